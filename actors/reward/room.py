"""How many executions of one queue may be under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from physarum.actors.reward.pool import Pool

_PASSING: Final = 64
"""Where no hook scores them."""


class Room:
    """Twice what the hook processes hold that score them, so that none of these waits while executions are published."""

    def __init__(self, pools: Collection[Pool]) -> None:
        self._pools = pools
        self._running: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()

    async def free(self) -> int:
        """Waits until another execution may be leased; how many may."""
        while (free := self._capacity() - len(self._running)) <= 0:
            self._freed.clear()
            await self._freed.wait()
        return free

    def take(self, task: asyncio.Task[None]) -> None:
        """Held until `task` ends."""
        self._running.add(task)
        task.add_done_callback(self._end)

    def _capacity(self) -> int:
        """It grows as hooks prove fast."""
        return 2 * sum(pool.capacity for pool in self._pools) or _PASSING

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._freed.set()
