"""B3, chaos: SIGKILL for any process of a run, again and again, each after the recovery of the last.

    storm     asynchronous run, stub engines: everybody is killed in turn, the bus and the supervisor too
    ordered   ordered mode, the same storm: the final weights are bit-equal to those of a run that nobody disturbed
    real      the quick start with SGLang (full size only): its server and the actor that keeps it are killed

lost, trained_twice: from the account. wrong_version: tokens that are not those of the weights that their span names.
throughput_kept: steps per second during the storm against those of the same run without it; throughput_expected is
1 - kills per second * mean recovery, what would be kept if nobody worked while one is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from physarum.actors.account import Account, account
from physarum.actors.supervisor.process import read_records
from physarum.bus.presence import Roster
from tests.bench.chaos_check import Journal, wrong_tokens
from tests.bench.chaos_run import BUS, SERVER, SUPERVISOR, ChaosRun, RunStuckError, stub_overrides
from tests.bench.chaos_storm import Kill, schedule, storm
from tests.bench.chaos_watch import Watch
from tests.bench.processes import ROOT
from tests.stub_engine.stub_tokens import tensor_digests

_log = logging.getLogger(__name__)

RECIPE: Final = Path(__file__).with_name("chaos.yaml")
QUICKSTART: Final = ROOT / "configs" / "quickstart.yaml"
_ENDLESS: Final = 1_000_000
_QUICKSTART_OPTIONS: Final = ("evaluation=null", f"stop.steps={_ENDLESS}", "supervisor.max_restarts=1000")
"""Six kills of one engine within minutes are more than the restart policy allows a run by default."""
_STEP_S: Final = 180.0
_MARGIN: Final = 5
"""Steps before the end of an ordered run from which on nobody is killed: recovery must be seen before the run ends."""


@dataclass(frozen=True)
class Sizes:
    """Kills of each part, weights' numbers before and after a storm, steps of the ordered runs."""

    storm_kills: int
    calm_steps: int
    ordered_kills: int
    ordered_steps: int
    real_kills: int


SIZES: Final = {"smoke": Sizes(0, 0, 6, 24, 0), "full": Sizes(48, 60, 16, 100, 6)}


@dataclass
class Part:
    """What one part found."""

    kills: list[Kill]
    account: Account | None = None
    wrong_version: int | None = None
    checked_tokens: int = 0
    kept: float | None = None
    expected: float | None = None
    bit_equal: bool | None = None


async def measure(size: str, seed: int = 0) -> dict[str, Any]:
    """The fields of B3."""
    sizes, rng = SIZES[size], random.Random(seed)
    parts: list[Part] = []
    with _place() as root:
        for kills, part in (
            (sizes.storm_kills, storm_part),
            (sizes.ordered_kills, ordered_part),
            (sizes.real_kills, real_part),
        ):
            if kills:
                parts.append(await part(root, sizes, rng))
                _log.info("%s: %s", part.__name__, report(parts[-1:]))
    return report(parts)


async def storm_part(root: Path, sizes: Sizes, rng: random.Random) -> Part:
    """Calm, storm, calm, in one run, so that rates are compared on the same machine at the same time."""
    async with _stub_run(root, "storm", f"stop.steps={_ENDLESS}") as (run, watch, journal):
        await watch.until_number(sizes.calm_steps, _STEP_S)
        began = len(watch.steps)
        kills = await storm(run, watch, schedule(victims(run), sizes.storm_kills, rng), rng)
        await watch.until_step(_STEP_S)
        ended = len(watch.steps)
        await watch.until_number(watch.number + sizes.calm_steps, _STEP_S)
        found = await _checked(watch, journal, kills, await account(watch.bus))
    calm = (_rate(watch, 0, began) + _rate(watch, ended, len(watch.steps))) / 2
    found.kept = _rate(watch, began, ended) / calm
    seconds = watch.steps[ended - 1][0] - watch.steps[began - 1][0]
    found.expected = 1 - sum(kill.recovery_s for kill in kills) / seconds
    return found


async def ordered_part(root: Path, sizes: Sizes, rng: random.Random) -> Part:
    """The same ordered run twice, once disturbed. Weights that training did not move would prove nothing."""
    options = ["trainer.ordered=true", "age.bound=0", f"stop.steps={sizes.ordered_steps}"]
    async with _stub_run(root, "ordered", *options) as (run, watch, journal):
        wanted = schedule(victims(run), sizes.ordered_kills, rng)
        await watch.until_number(1, _STEP_S)
        kills = await storm(run, watch, wanted, rng, last_number=sizes.ordered_steps - _MARGIN)
        summary = await run.ended()
        found = await _checked(watch, journal, kills, msgspec.convert(summary["account"], Account))
    calm = ChaosRun(RECIPE, root, "calm", [*stub_overrides(root / "calm.jsonl"), *options])
    try:
        await calm.up()
        await calm.ended()
    finally:
        calm.stop()
    trained = tensor_digests(run.folder.model)
    if trained.keys() != tensor_digests(run.folder.start_model).keys() or not trained:
        raise RunStuckError(f"{run.folder.model} does not hold the tensors of the start model: nothing to compare")
    moved = trained != tensor_digests(run.folder.start_model)
    found.bit_equal = moved and trained == tensor_digests(calm.folder.model)
    return found


async def real_part(root: Path, sizes: Sizes, rng: random.Random) -> Part:
    """SGLang's server and its actor are killed in turn while the quick start trains."""
    run = ChaosRun(QUICKSTART, root, "real", _QUICKSTART_OPTIONS)
    try:
        await run.up()
        async with _watching(run) as watch:
            await watch.until_number(1, 10 * _STEP_S)
            wanted = [("policy-0" + SERVER, "policy-0")[index % 2] for index in range(sizes.real_kills)]
            kills = []
            for victim in wanted:
                kills += await storm(run, watch, [victim], rng)
                await watch.until_step(_STEP_S)
            closed = await account(watch.bus)
    finally:
        run.stop()
    return Part(kills, closed)


def victims(run: ChaosRun) -> list[str]:
    """Every process of a run with stub engines."""
    instances = [record.instance for record in read_records(run.folder.actors)]
    servers = [record.instance + SERVER for record in read_records(run.folder.actors) if record.role == "engine"]
    return [*instances, *servers, BUS, SUPERVISOR]


def report(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of the benchmark from those of its parts; null where nothing was measured."""
    kills = [kill for part in parts for kill in part.kills]
    real = sum(len(part.kills) for part in parts if part.wrong_version is None)
    accounts = [part.account for part in parts if part.account is not None]
    checked = [part.wrong_version for part in parts if part.wrong_version is not None]
    engines = sum(kill.role == "engine" for kill in kills)
    by_role = {role: _recoveries([kill for kill in kills if kill.role == role]) for role in {k.role for k in kills}}
    every = [kill.recovery_s for kill in kills]
    return {
        "kills": len(kills),
        "by_role": dict(sorted(by_role.items())),
        "engine": {"stub_kills": engines - real, "real_kills": real},
        "lost": sum(abs(one.imbalance) for one in accounts),
        "trained_twice": sum(one.double_trained for one in accounts),
        "wrong_version": sum(checked) if checked else None,
        "checked_tokens": sum(part.checked_tokens for part in parts),
        "recovery_p50_s": round(float(np.percentile(every, 50)), 2),
        "recovery_p99_s": round(float(np.percentile(every, 99)), 2),
        "throughput_kept": _first([part.kept for part in parts]),
        "throughput_expected": _first([part.expected for part in parts]),
        "ordered_bit_equal": next((part.bit_equal for part in parts if part.bit_equal is not None), None),
        "account": [one.to_dict() for one in accounts],
    }


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder for the runs: temporary, or the one named by the environment, which is kept to look at."""
    kept = os.environ.get("PHYSARUM_BENCH_FOLDER")
    if kept is not None:
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="b3-") as place:
        yield Path(place)


@contextlib.asynccontextmanager
async def _stub_run(root: Path, name: str, *overrides: str) -> AsyncIterator[tuple[ChaosRun, Watch, Journal]]:
    path = root / f"{name}.jsonl"
    run = ChaosRun(RECIPE, root, name, [*stub_overrides(path), *overrides])
    try:
        await run.up()
        async with _watching(run) as watch:
            yield run, watch, Journal(path)
    finally:
        run.stop()


@contextlib.asynccontextmanager
async def _watching(run: ChaosRun) -> AsyncIterator[Watch]:
    bus = await run.connect()
    try:
        watch = Watch(bus, Roster(bus))
        async with watch.open():
            yield watch
    finally:
        await bus.close()


async def _checked(watch: Watch, journal: Journal, kills: list[Kill], closed: Account) -> Part:
    """Every sample that came, token for token."""
    executions = list(watch.executions)
    await asyncio.to_thread(journal.read_on)
    wrong = sum(wrong_tokens(execution, journal) for execution in executions)
    tokens = sum(int(sample.loss_mask.sum()) for execution in executions for sample in execution.samples)
    return Part(kills, closed, wrong + len(journal.ambiguous), tokens)


def _rate(watch: Watch, first: int, last: int) -> float:
    """Steps per second between two positions in the list of steps."""
    seen = watch.steps[first:last]
    return (len(seen) - 1) / (seen[-1][0] - seen[0][0])


def _recoveries(kills: Sequence[Kill]) -> dict[str, float]:
    seconds = [kill.recovery_s for kill in kills]
    return {
        "kills": len(kills),
        "recovery_p50_s": round(float(np.percentile(seconds, 50)), 2),
        "recovery_p99_s": round(float(np.percentile(seconds, 99)), 2),
    }


def _first(values: Sequence[float | None]) -> float | None:
    return next((round(value, 3) for value in values if value is not None), None)
