"""B6, the bus tax: what it costs to bring a sample from task to trainer, with leases, receipts, dedupe and ledger.

Source, rollout, reward and trainer are the product's own actors in processes of their own over an embedded server; the
episode is there at once and the trainer's world does nothing, so all that remains is the bus and the records.

    consumption  SAMPLES is full; the trainer reads headers, plans, records, fetches bodies, steps, checkpoints
    end to end   then everything runs at once, from the first task to the last step
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.wire import publish_execution
from physarum.bus import ledger
from physarum.bus.ledger import StepRecord
from physarum.bus.log import LogReader
from physarum.bus.presence import Roster
from physarum.bus.records import Execution, Task
from tests.bench import bus_tax_hooks, host
from tests.bench.processes import actors, cpu_s, rss_mib
from tests.bench.stage import Stage, open_stage

FILLED: Final = "filled"
"""The source of what is put into SAMPLES beforehand: its ordinals are not those of the source that runs."""
RECIPE: Final = Path(__file__).with_name("bus_tax.yaml")
_START_S: Final = 120.0
_PHASE_S: Final = 3600.0
_TOGETHER: Final = 1024


@dataclass(frozen=True)
class Load:
    """One row: executions of `size_bytes` in steps of `groups` groups: `consume_steps`, then `steps` end to end."""

    size_bytes: int
    groups: int
    steps: int
    consume_steps: int

    @property
    def batch(self) -> int:
        return self.groups * bus_tax_hooks.GROUP


LOADS: Final = {
    "smoke": (Load(1 << 10, 32, 8, 24), Load(100 << 10, 4, 6, 6), Load(10 << 20, 1, 2, 2)),
    "flat": (Load(1 << 10, 32, 391, 20),),  # a hundred thousand: is memory flat? CI asks it
    "long": (Load(1 << 10, 32, 3_907, 100),),  # a million
    "full": (Load(1 << 10, 32, 400, 100), Load(100 << 10, 8, 30, 30), Load(10 << 20, 1, 8, 8)),
}


@dataclass(frozen=True)
class Measured:
    """One load. `growth_mib`: each process's memory, from the first quarter of the samples to the end."""

    row: dict[str, float]
    samples: int
    growth_mib: dict[str, float]


async def measure(size: str) -> dict[str, Any]:
    """The fields of B6."""
    with tempfile.TemporaryDirectory(prefix="b6-") as place:
        folder = Path(place)
        limits = {"fsync_per_s": round(host.fsync_per_s(folder), 1), "memcpy_gib_s": round(host.memcpy_gib_s(), 2)}
        found = [await _measured(folder / f"load-{number}", load) for number, load in enumerate(LOADS[size])]
        small = found[0]
        return {
            "rows": [one.row for one in found],
            **limits,
            "rss_growth_mib": round(sum(small.growth_mib.values()), 1),
            "rss_growth_by_process": {name: round(mib, 1) for name, mib in small.growth_mib.items()},
            "samples": small.samples,
        }


async def _measured(folder: Path, load: Load) -> Measured:
    async with open_stage(folder, RECIPE, _overrides(load)) as stage, Roster(stage.bus).open() as roster:
        await _fill(stage.context, load, load.consume_steps * load.batch)
        workers = [("reward", "reward-0"), ("rollout", "rollout-0"), ("trainer", "trainer-0")]
        with actors(folder, workers) as members:
            await _until_step(stage, load.consume_steps)
            with actors(folder, [("source", "source-0")]) as source:
                everybody = {**members, **source, "bus": stage.server}
                await _ready(roster, {"reward-0", "rollout-0", "source-0"})
                cpu, began = cpu_s(everybody.values()), time.time()
                await _until_step(stage, load.consume_steps + load.steps // 4)
                early = _memory(everybody)
                await stage.until_done(_PHASE_S)
                cpu, late = cpu_s(everybody.values()) - cpu, _memory(everybody)
        ready = (await stage.register(states.TrainerReady).get(states.TRAINER_READY)).value
        assert ready is not None, "the trainer ends only after it was ready"
        steps = await stage.steps()
        samples, consumed = load.steps * load.batch, load.consume_steps * load.batch
        row = {
            "size_bytes": load.size_bytes,
            "end_to_end_per_s": round(samples / (steps[-1].finished_at - began), 1),
            "consume_per_s": round(consumed / (steps[load.consume_steps - 1].finished_at - ready.at), 1),
            "cpu_us_per_sample": round(1e6 * cpu / samples, 1),
        }
        return Measured(row, samples, {name: late[name] - early[name] for name in early})


def _memory(everybody: Mapping[str, psutil.Process]) -> dict[str, float]:
    return {name: rss_mib([process]) for name, process in everybody.items()}


def _overrides(load: Load) -> list[str]:
    return [
        f"rollout.args.size_bytes={load.size_bytes}",
        f"trainer.groups_per_batch={load.groups}",
        f"stop.steps={load.consume_steps + load.steps}",
    ]


async def _fill(context: Context, load: Load, count: int) -> None:
    """Scored executions straight into SAMPLES, as the reward actor publishes them."""
    for first in range(0, count, _TOGETHER):
        some = (_execution(ordinal, load.size_bytes) for ordinal in range(first, min(count, first + _TOGETHER)))
        await asyncio.gather(*(publish_execution(context, "samples", execution) for execution in some))


def _execution(ordinal: int, size_bytes: int) -> Execution:
    index, member = divmod(ordinal, bus_tax_hooks.GROUP)
    group = f"{FILLED}/0/{index}"
    task = Task(
        id=f"{group}/{member}",
        run="bench",
        source=FILLED,
        ordinal=ordinal,
        group=group,
        group_size=bus_tax_hooks.GROUP,
        member=member,
        prompt="bus",
        label="tax",
    )
    made = bus_tax_hooks.sample(size_bytes, float(member % 2))
    return Execution(id=f"{task.id}:bench", task=task, samples=[made], worker="bench", started_at=0.0, finished_at=0.0)


async def _ready(roster: Roster, instances: set[str]) -> None:
    async with asyncio.timeout(_START_S):
        while not instances <= {beat.instance for beat in roster.members if beat.state == "ready"}:
            await roster.wait_change(_START_S)


async def _until_step(stage: Stage, number: int) -> None:
    reader = LogReader(stage.bus, "ledger")
    seen = 0
    async with asyncio.timeout(_PHASE_S), contextlib.aclosing(reader.batches()) as batches:
        async for batch in batches:
            seen += sum(isinstance(ledger.decode_entry(entry).record, StepRecord) for entry in batch)
            if seen >= number:
                return
