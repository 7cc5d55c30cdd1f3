"""Logs of actors stay below a size: one that grows above it becomes `NAME.log.1`, and the `NAME.log.1` before it goes.

The processes that write it keep the file open, so it is copied and cut, not renamed: they append (O_APPEND), and go on at
its new end. Lines written between the copy and the cut are lost; nothing exact is read from a log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

_log = logging.getLogger(__name__)


class LogBound:
    """The `*.log` files in `folder`, each at most `limit_bytes` and what is written in `period_s`."""

    def __init__(self, folder: Path, limit_bytes: int, period_s: float) -> None:
        self._folder, self._limit_bytes, self._period_s = folder, limit_bytes, period_s

    async def keep(self) -> None:
        """For ever; sizes are sampled with the heartbeat, they have no event."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(self._period_s)

    def look(self) -> None:
        """Cuts what is too large. Blocking."""
        for path in self._folder.glob("*.log"):
            try:
                if path.stat().st_size > self._limit_bytes:
                    _cut(path)
            except OSError as error:
                _log.warning("%s is not cut to supervisor.log_bytes: %s", path, error)


def _cut(path: Path) -> None:
    aside = path.with_name(f".{path.name}.1")
    try:
        shutil.copyfile(path, aside)
        os.replace(aside, path.with_name(f"{path.name}.1"))
    finally:
        aside.unlink(missing_ok=True)
    os.truncate(path, 0)
