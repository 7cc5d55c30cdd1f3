"""Reads ADDED for the source: what is to be issued next of it, and any of it again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import Final

from physarum.actors.added_rows import AddedRow
from physarum.bus import log
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import CodecError
from physarum.bus.log import LogEntry, LogReader

_log = logging.getLogger(__name__)

_WAIT_S: Final = 5.0


class Additions:
    """`changed` is set when something came."""

    def __init__(self, bus: Bus, changed: asyncio.Event) -> None:
        self._bus, self._changed = bus, changed
        self._waiting: deque[tuple[int, AddedRow]] = deque()

    async def follow(self, through: int) -> None:
        """Never returns. `through`: what was issued before."""
        async with aclosing(LogReader(self._bus, "added", through + 1).batches(_WAIT_S)) as batches:
            async for batch in batches:
                for entry in batch:
                    self._take(entry)
                if batch:
                    self._changed.set()

    def next(self, through: int) -> tuple[int, AddedRow] | None:
        """The first row behind sequence `through`; None where nothing waits."""
        while self._waiting and self._waiting[0][0] <= through:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    async def at(self, sequence: int) -> AddedRow:
        """One row, whatever waits. Raises LogGapError when ADDED does not hold it."""
        return decode((await log.get(self._bus, "added", sequence)).data, AddedRow)

    def _take(self, entry: LogEntry) -> None:
        try:
            self._waiting.append((entry.sequence, decode(entry.data, AddedRow)))
        except CodecError as error:
            _log.error("ADDED #%d is not issued, it cannot be read: %s", entry.sequence, error)
