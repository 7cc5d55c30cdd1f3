"""Every name on the bus, in one place: streams `<run>_TASKS`, subjects `ph.<run>.<stream>.<key>`, headers `Ph-*`."""

from __future__ import annotations

import re
from typing import Final, Literal, NewType, TypeAlias

import xxhash

from physarum.bus.errors import BusError

RUN_HEADER: Final = "Ph-Run"
RECORD_HEADER: Final = "Ph-Header"
BLOB_HEADER: Final = "Ph-Blob"
SCORES_HEADER: Final = "Ph-Scores"
MESSAGE_ID_HEADER: Final = "Nats-Msg-Id"

LedgerKey = NewType("LedgerKey", str)
"""The ledger of a further policy."""
StreamKey: TypeAlias = (
    Literal[
        "tasks",
        "episodes",
        "samples",
        "evals",
        "ledger",
        "dead",
        "added",
        "metrics",
        "lease",
        "presence",
        "claims",
        "weights",
        "run",
    ]
    | LedgerKey
)
TASK_CLASSES: Final = ("partial", "p0", "p1", "eval")

_BLOB: Final = "blob"
_RUN: Final = re.compile(r"[a-z0-9-]{1,32}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_=/+@#:-]")


class RunNameError(BusError, ValueError):
    """A run id that cannot be part of stream and subject names."""


def check_run(run: str) -> str:
    """Raises RunNameError unless `run` is 1 to 32 of a-z, 0-9 and '-'."""
    if not _RUN.fullmatch(run):
        raise RunNameError(f"run id {run!r} is not usable: expected 1 to 32 characters of a-z, 0-9 and '-'")
    return run


def ledger_of(policy: str) -> StreamKey:
    """The ledger of a policy, "" for the run's own: each is a log of its own, so that its sequences have no gaps."""
    return LedgerKey(f"ledger-{policy}") if policy else "ledger"


def stream(run: str, key: StreamKey) -> str:
    return f"{run}_{key.upper()}"


def subject(run: str, key: StreamKey, *tokens: str) -> str:
    """`ph.<run>.<key>.<token>...`; characters that NATS reserves are replaced, so a task id may be a token."""
    return ".".join(("ph", run, key, *(_UNSAFE.sub("_", token) for token in tokens)))


def training(partition: int | None = None) -> str:
    """The token of training executions in a subject of EPISODES: of all, or of one partition of the groups."""
    return "train" if partition is None else f"train-{partition}"


def partition_of(group: str, partitions: int) -> int:
    """Which partition a group belongs to, the same for everybody and for ever."""
    return xxhash.xxh3_64_intdigest(group.encode()) % partitions


def by_reference(subject: str, digest: str) -> str:
    """The subject of a message whose body is blob `digest`: what refers to blobs can be found without reading a message."""
    return f"{subject}.{_BLOB}.{digest}"


def referenced(subject: str) -> str | None:
    """The digest that `by_reference` put into a subject; None where it did not."""
    *_, marker, digest = subject.split(".")
    return digest if marker == _BLOB else None


def references(run: str, key: StreamKey) -> str:
    """The pattern of every subject in a stream that `by_reference` made."""
    return f"ph.{run}.{key}.*.*.{_BLOB}.*"


def all_subjects(run: str, key: StreamKey) -> str:
    return f"ph.{run}.{key}.>"


def changed_subject(run: str, key: StreamKey, *tokens: str) -> str:
    """Where a register announces that a value *was stored* (the server republishes it then, never before)."""
    return ".".join(("ph", run, "changed", key, *(_UNSAFE.sub("_", token) for token in tokens)))


def echo_subject(run: str, connection: str) -> str:
    """Where one connection sends messages to itself."""
    return f"ph.{run}.ping.{connection}"


def full_subject(run: str, key: str) -> str:
    """Where publishers say that they wait for room in a stream."""
    return f"ph.{run}.full.{key}"


def rollcall_subject(run: str, role: str) -> str:
    """Where one process tells everybody what changed in the presence of a role."""
    return f"ph.{run}.rollcall.{role}"


def control_subject(run: str, role: str, instance: str, verb: str) -> str:
    return f"ph.{run}.control.{role}.{instance}.{verb}"
