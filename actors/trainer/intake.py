"""Feeding the planner: headers of SAMPLES from the cursor on, and the members that were dead-lettered."""

from __future__ import annotations

import asyncio
import logging

from physarum.actors.context import Context
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.planner import Arrived, Planner
from physarum.actors.wire import read_header
from physarum.bus.codec import decode
from physarum.bus.errors import CodecError
from physarum.bus.intervals import IntervalSet
from physarum.bus.log import LogReader
from physarum.bus.records import Execution, Task
from physarum.bus.work import DeadLetter

_log = logging.getLogger(__name__)


class Intake:
    """Two readers that fill the planner. `changed` is set whenever a plan may have become possible."""

    def __init__(self, context: Context, planner: Planner, cursor: Cursor, replayed: IntervalSet) -> None:
        self._context, self._planner, self._cursor = context, planner, cursor
        self._replayed = replayed
        self.changed = asyncio.Event()
        self.unreadable = 0

    async def read_samples(self) -> None:
        """Admits every sample above the cursor that no recorded plan holds, in log order, for ever."""
        reader = LogReader(self._context.bus, "samples", self._cursor.floor, headers_only=True)
        async for batch in reader.batches(self._context.config.bus.fetch_timeout_s):
            for entry in batch:
                if entry.sequence in self._cursor.consumed or entry.sequence in self._replayed:
                    continue
                self._planner.admit(Arrived(entry.sequence, read_header(entry.headers)))
            if batch:
                self.changed.set()

    async def read_dead(self) -> None:
        """Closes the places of members that were dead-lettered, from the beginning of DEAD, for ever."""
        reader = LogReader(self._context.bus, "dead")
        async for batch in reader.batches(self._context.config.bus.fetch_timeout_s):
            for entry in batch:
                task = dead_task(decode(entry.data, DeadLetter))
                if task is not None and task.task_class != "eval":
                    self._planner.bury(task.group, task.group_size, task.member)
            if batch:
                self.changed.set()


def dead_task(letter: DeadLetter) -> Task | None:
    """The task that a dead letter is about; None where its bytes cannot be read (a poison message)."""
    try:
        if letter.stream.endswith("_EPISODES"):
            return decode(letter.body, Execution).task
        return decode(letter.body, Task)
    except CodecError as error:
        _log.warning("dead letter %s #%d holds no readable task: %s", letter.stream, letter.sequence, error)
        return None
