"""Feeding the planner: headers of SAMPLES from the cursor on, and the members that were dead-lettered."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from physarum.actors.context import Context
from physarum.actors.dead_letters import DeadTask, dead_task
from physarum.actors.own_samples import OwnSamples
from physarum.actors.tools.marks import read_marks
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.groups import Arrived, DeadMember
from physarum.actors.trainer.planner import Planner
from physarum.actors.wire import read_header
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import RefillRecord
from physarum.bus.log import LogGapError, LogReader


class Intake:
    """Two readers that fill the planner. `changed` is set whenever a plan may have become possible; `refills` are asked
    for by deaths and wait to be recorded. `came` is set whenever samples were taken in, for whoever fetches ahead."""

    def __init__(self, context: Context, planner: Planner, cursor: Cursor, replayed: IntervalSet) -> None:
        self._context, self._planner, self._cursor = context, planner, cursor
        self._replayed = replayed
        self._own = OwnSamples.of(context.config)
        self.changed = asyncio.Event()
        self.came = asyncio.Event()
        self.refills: list[RefillRecord] = []
        self.samples_through = cursor.floor - 1
        self.dead_through = 0
        """Sequences up to which SAMPLES and DEAD were taken in."""

    async def read_samples(self) -> None:
        """Admits every sample above the cursor that no recorded plan holds, in log order, for ever.

        What the reader passed over (another run's message) is consumed: it would hold the log's floor for ever. Raises
        LogGapError for what is missing above the cursor; below, plans that are replayed have consumed it unread, and a
        checkpoint of theirs may have let it go.
        """
        while True:
            try:
                await self._read_on(max(self.samples_through + 1, self._cursor.floor))
            except LogGapError:
                if self.samples_through + 1 >= self._cursor.floor:
                    raise
                self.samples_through = self._cursor.floor - 1

    async def _read_on(self, start: int) -> None:
        reader = LogReader(self._context.bus, "samples", start, headers_only=True)
        async with aclosing(reader.batches(self._context.config.bus.fetch_timeout_s)) as batches:
            async for batch in batches:
                for entry in batch:
                    if entry.sequence not in self._cursor.consumed and entry.sequence not in self._replayed:
                        header = self._own.header(read_header(entry.headers))
                        self._planner.admit(Arrived(entry.sequence, header), time.monotonic())
                ours = {entry.sequence for entry in batch}
                for sequence in range(self.samples_through + 1, reader.next_sequence):
                    if sequence not in ours:
                        self._cursor.consumed.add(sequence)
                self.samples_through = reader.next_sequence - 1
                if batch:
                    self.changed.set()
                    self.came.set()

    async def read_dead(self) -> None:
        """Gives up, or asks to refill, the members that were dead-lettered, from the beginning of DEAD, for ever."""
        reader = LogReader(self._context.bus, "dead")
        async with aclosing(reader.batches(self._context.config.bus.fetch_timeout_s)) as batches:
            async for batch in batches:
                retried = await self._retried() if batch else set()
                for entry in batch:
                    if entry.sequence not in retried:
                        self._bury(dead_task(entry, self._context.bus.run))
                self.dead_through = reader.next_sequence - 1
                if batch:
                    self.changed.set()

    async def _retried(self) -> set[int]:
        """Letters that were sent on their way again: their members may still come."""
        return {number for number, mark in (await read_marks(self._context.bus)).items() if mark.action == "retried"}

    def revive(self, dead: DeadTask) -> None:
        """A letter that was taken in before is being sent on its way again."""
        self._planner.revive(_member(dead), time.monotonic())

    def _bury(self, dead: DeadTask | None) -> None:
        if dead is None or dead.evaluation or dead.source is None:
            return
        refill = self._planner.bury(_member(dead), time.monotonic())
        if refill is not None:
            self.refills.append(refill)


def _member(dead: DeadTask) -> DeadMember:
    assert dead.source is not None
    return DeadMember(dead.source, dead.ordinal, dead.group, dead.group_size, dead.member, dead.attempt, dead.final)
