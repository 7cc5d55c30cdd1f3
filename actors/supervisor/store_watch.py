"""Notices that the embedded nats-server cannot write its store, says so, and heals it when there is room again.

nats-server answers nobody when a write fails, and a stream that failed once refuses every message until the server is
started anew, also when space was freed long ago. Its log alone tells, so the log is read on with every heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from physarum.bus import room
from physarum.configs.origin import display_path

_log = logging.getLogger(__name__)

_FAILED: Final = re.compile(r"JetStream failed to store a msg on stream '.*? > (\S+)': (.*)")
_READ_BYTES: Final = 1 << 20


class StoreWatch:
    """`restart` ends the server; whoever keeps it starts it again. Begins at the end of the present log."""

    def __init__(self, log: Path, period_s: float, restart: Callable[[], Awaitable[None]]) -> None:
        self._path, self._period_s, self._restart = log, period_s, restart
        self._offset = log.stat().st_size if log.exists() else 0
        self._failing = False

    async def keep(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def look(self) -> None:
        """Reads what the server wrote since the last look, and does what it calls for."""
        causes = [match[2] for match in _FAILED.finditer(self._news())]
        full = [cause for cause in causes if room.says_full(cause)]
        if causes and not full and not self._failing:
            _log.error("the bus cannot write its store: %s; see %s", causes[-1], display_path(self._path))
        if full and not self._failing:
            self._failing = True
            _log.error(
                "the disk of %s is full (%d MiB free, at least %d needed): the bus stores nothing and the run waits. Nothing"
                " that was accepted is lost. Free space there; the run then goes on by itself",
                *(display_path(self._path.parent), room.free_bytes(self._path.parent) >> 20, room.NEEDED_BYTES >> 20),
            )
        if self._failing and room.free_bytes(self._path.parent) >= room.NEEDED_BYTES:
            self._failing = False
            _log.warning("the disk of %s has room again: starting the bus anew", display_path(self._path.parent))
            await self._restart()
            self._news()  # what it wrote until its end is about the past

    def _news(self) -> str:
        """At most the last megabyte of what was added; a full disk keeps even the server's log from growing."""
        try:
            with self._path.open("rb") as log:
                end = log.seek(0, 2)
                log.seek(max(min(self._offset, end), end - _READ_BYTES))
                self._offset = end
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
