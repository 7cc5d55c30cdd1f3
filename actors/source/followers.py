"""Feeds `Disposals` from a policy's LEDGER and from DEAD, from their beginning, and says when something changed."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import Final

from physarum.actors.context import Context
from physarum.actors.dead_letters import DeadTask, dead_task
from physarum.actors.source.admission import Disposals
from physarum.actors.source.askable import Askable
from physarum.actors.source.clock import Clock
from physarum.actors.source.curriculum import Lessons
from physarum.actors.source.pinning import Numbers
from physarum.bus import names
from physarum.bus.ledger import Numbered, RefillRecord, decode_entry
from physarum.bus.log import LogReader

_log = logging.getLogger(__name__)

_WAIT_S: Final = 5.0


class Followers:
    """`changed` is set after each batch that was folded in. `policy`: whose ledger is followed."""

    def __init__(
        self,
        context: Context,
        source: str,
        lessons: Lessons | None = None,
        policy: str = "",
        changed: asyncio.Event | None = None,
    ) -> None:
        self._context = context
        self._source = source
        self._ledger = names.ledger_of(policy)
        self.clock = Clock()
        self._lessons = lessons
        self.disposals = Disposals(source)
        self._askable = Askable(source, context.config.groups.refills)
        self.numbers = Numbers()
        self.changed = asyncio.Event() if changed is None else changed
        self.refills: deque[tuple[int, RefillRecord]] = deque()

    @property
    def oldest_needed(self) -> int:
        """The first ordinal that may be issued again: it was asked for and is not issued yet, or may still be asked for."""
        return min((self._askable.oldest, *(record.ordinal - record.member for _, record in self.refills)))

    async def follow_ledger(self) -> None:
        """Never returns. Raises LogGapError when the ledger lost records."""
        async with aclosing(LogReader(self._context.bus, self._ledger).batches(_WAIT_S)) as batches:
            async for batch in batches:
                for entry in batch:
                    self._record(decode_entry(entry))
                self._notify(len(batch))

    async def follow_dead(self) -> None:
        """Never returns. Dead letters of evaluation and of other sources are not ours."""
        async with aclosing(LogReader(self._context.bus, "dead").batches(_WAIT_S)) as batches:
            async for batch in batches:
                for entry in batch:
                    self._count(dead_task(entry, self._context.bus.run))
                self._notify(len(batch))

    def _record(self, item: Numbered) -> None:
        self.disposals.record(item)
        self._askable.record(item)
        self.numbers.record(item)
        if self._lessons is not None:
            self._lessons.record(item)
        self.clock.record(item, self.disposals.count - self.disposals.dead_count)
        if isinstance(item.record, RefillRecord) and item.record.source == self._source:
            self.refills.append((item.sequence, item.record))

    def _count(self, task: DeadTask | None) -> None:
        if task is None or task.evaluation:
            return
        if task.source is None:
            _log.error("a dead letter names no task (%s); it is counted as one task of this source", task.reason)
            self.disposals.dead_unnamed()
        elif task.source == self._source:
            self.disposals.dead(task.ordinal, task.attempt)
            self._askable.dead(task.ordinal, task.attempt, final=task.final)

    def _notify(self, entries: int) -> None:
        if entries:
            self.changed.set()
