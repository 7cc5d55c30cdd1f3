"""What actors tell each other through the RUN register: the run's few facts that are neither samples nor weights."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from physarum.bus.version import Fork

EVAL_START: Final = "eval-start"
EVAL_END: Final = "eval-end"
EVAL_AT: Final = "eval-at"
TRAINER_READY: Final = "trainer-ready"
TRAINER_DONE: Final = "trainer-done"
SOURCE_POSITION: Final = "source-position"
HEAD: Final = "head"
EVAL_HEAD: Final = "eval-head"
"""The version that engines kept for evaluations serve, by the model's name: they take the next when the evaluator says so."""
MIRRORED: Final = "mirrored"
"""The newest version in `checkpoint.versions.mirror`, by the model's name: the head as it was when that was copied."""
ENGINE: Final = "engine"
TURN: Final = "turn"
CANARY: Final = "canary"
FROZEN: Final = "frozen"
PINS: Final = "pins"
EVAL_DUE: Final = "eval-due"
DEAD_MARK: Final = "dead"
HOLD: Final = "hold"
SCALE: Final = "scale"
CORDONED: Final = "cordoned"
SAMPLING: Final = "sampling"
FLOOR: Final = "floor"
ASSEMBLY: Final = "assembly"

Phase: TypeAlias = Literal["open", "finished", "stopped", "failed"]


class Cordoned(msgspec.Struct, frozen=True):
    """Actors that are given nothing new, also once they are started again."""

    instances: frozenset[str] = frozenset()


class TrainerReady(msgspec.Struct, frozen=True):
    """The trainer holds its weights and reads samples (latest takeover)."""

    epoch: int
    number: int
    at: float


class TrainerDone(msgspec.Struct, frozen=True):
    """Training ended; `version` is the label of the last weights, `model` the HF folder they were written to."""

    reason: str
    version: str
    steps: int
    model: str
    at: float


class Floor(msgspec.Struct, frozen=True):
    """A policy needs nothing of SAMPLES below `sequence`."""

    sequence: int


class Hold(msgspec.Struct, frozen=True):
    """Training waits after its takeover until it is `released`."""

    reason: str
    at: float
    released: bool = False


class SetScore(msgspec.Struct, frozen=True, kw_only=True):
    """One set of problems at one version: mean reward, answers to each problem, how many were scored, pass@k by k.

    `off_version` counts executions in which another version made tokens.
    """

    score: float
    problems: int
    samples: int
    scored: int
    off_version: int
    pass_at: dict[int, float] = {}


class Scaled(msgspec.Struct, frozen=True):
    """The numbers of the instances that groups of actors should have (scaling.py); others are as configured."""

    groups: dict[str, list[int]]
    at: float


class Assembly(msgspec.Struct, frozen=True, kw_only=True):
    """The head's word to the other machines of its run (supervisor/assembly.py). `configuration`: what must be the same there
    (configs/portable.py); `sources`: the digest of each hook's Python files; `layout`: of run folders and streams; `address`:
    at which the head is reached."""

    phase: Phase
    reason: str
    layout: str
    configuration: dict[str, Any]
    sources: dict[str, str]
    host: str
    address: str
    at: float


class ChangedSampling(msgspec.Struct, frozen=True):
    """Sampling parameters laid over `rollout.sampling` while the run goes on; empty: as configured."""

    values: dict[str, Any]
    at: float


class EvalScore(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out score at one version: the mean of its sets' scores, and their counts together."""

    version: str
    score: float
    problems: int
    scored: int
    off_version: int
    started_at: float
    finished_at: float
    sets: dict[str, SetScore] = {}


class CurriculumStage(msgspec.Struct, frozen=True):
    """The state of a source's curriculum for the tasks from ordinal `first` on."""

    first: int
    state: Any


class SourcePosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a source has issued: the next row to issue and how many tasks it has issued. Belongs to the source alone."""

    epoch: int
    index: int
    issued: int
    token: int
    finished: bool = False
    refills: int = 0
    """Further attempts issued on the trainer's request, counted beside `issued`."""
    refilled_through: int = 0
    """Requests in LEDGER up to this sequence are issued."""
    stages: list[CurriculumStage] = []
    """Of the curriculum: the newest, and those under which tasks that are still out were issued."""
    observed_through: int = 0
    """Plans in LEDGER up to this sequence are part of the newest stage."""
    added_through: int = 0
    """Rows in ADDED up to this sequence are issued (or could not be)."""
    adding: int = 0
    """The row in ADDED whose tasks take the next ordinals, decided before the first of them is stored; 0: the row at
    (epoch, index) does."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How far one engine has come with a version: `state` since `at` (Unix seconds). `staged`: its bytes are in the memory of
    the engine's host; `canary`: it serves the version for a gate to judge; `refused`: it serves what it served before, `reason`
    says why."""

    engine: str
    label: str
    state: Literal["announced", "staged", "verified", "canary", "live", "refused", "quarantined"]
    reason: str = ""
    at: float


class Pins(msgspec.Struct, frozen=True):
    """Versions that the checkpoint service keeps, whatever becomes old."""

    labels: list[str] = []


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The newest published version of a model and the digest of its manifest."""

    label: str
    epoch: int
    number: int
    manifest: str
    total_bytes: int
    published_at: float
    withdrawn: tuple[Fork, ...] = ()
    """What was withdrawn before its epoch began, as (newest epoch then, last number that holds)."""
