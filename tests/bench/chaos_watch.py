"""A bystander of a run: who is there, which steps were made, which samples came, over its own connection to the bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from physarum.bus import ledger, log
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.ledger import StepRecord
from physarum.bus.log import LogReader
from physarum.bus.presence import Roster
from physarum.bus.records import Execution

READY = frozenset({"ready", "finished", "finishing"})
_AGAIN_S = 0.02


@dataclass
class Watch:
    """`steps`: (seen at, number, executions) in the order of LEDGER; `executions`: everything that was in SAMPLES."""

    bus: Bus
    roster: Roster
    steps: list[tuple[float, StepRecord]] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def number(self) -> int:
        """Of the weights after the last step seen."""
        return self.steps[-1][1].number if self.steps else 0

    async def until_ready(self, instance: str, not_pid: int, timeout_s: float) -> None:
        """Until another process of that name has announced that it works. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not any(
                beat.instance == instance and beat.pid != not_pid and beat.state in READY
                for beat in self.roster.members
            ):
                await self.roster.wait_change(timeout_s)

    async def until_bus(self, timeout_s: float) -> None:
        """Until JetStream answers again; nothing announces that."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await log.state(self.bus, "ledger")
                except BusError:
                    await asyncio.sleep(_AGAIN_S)
                else:
                    return

    async def until_number(self, number: int, timeout_s: float) -> None:
        """Until a step has left weights of at least that number. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.number < number:
                self.stepped.clear()
                await self.stepped.wait()

    async def until_step(self, timeout_s: float) -> None:
        """Until one more step has been made. Raises TimeoutError."""
        seen = len(self.steps)
        async with asyncio.timeout(timeout_s):
            while len(self.steps) == seen:
                self.stepped.clear()
                await self.stepped.wait()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Follows the run during the block; a follower that fails ends the block with its error."""
        async with self.roster.open(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._follow_ledger()), group.create_task(self._follow_samples())]
            yield
            for task in tasks:
                task.cancel()

    async def _follow_ledger(self) -> None:
        async with contextlib.aclosing(LogReader(self.bus, "ledger").batches(2.0)) as batches:
            async for batch in batches:
                found = [ledger.decode_entry(entry).record for entry in batch]
                self.steps += [(time.monotonic(), record) for record in found if isinstance(record, StepRecord)]
                self.stepped.set()

    async def _follow_samples(self) -> None:
        async with contextlib.aclosing(LogReader(self.bus, "samples").batches(2.0)) as batches:
            async for batch in batches:
                self.executions += [decode(entry.data, Execution) for entry in batch]
