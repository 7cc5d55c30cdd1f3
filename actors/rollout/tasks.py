"""Tasks for a worker's free slots, the highest class first.

JetStream has no priorities and refuses overlapping work-queue filters, so each class has a consumer of its own. When a
slot is free the classes are asked in order; when none has anything, one waiting request stays open on each of them, and
whatever comes first is taken. At most one task per class is leased beyond the free slots; it starts next. A waiting request
is made again when it expires, and nothing else is asked for: a thousand workers that wait cost the server little.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Literal

from physarum.actors.context import Context
from physarum.bus.names import TASK_CLASSES
from physarum.bus.work import Delivery, WorkQueue

_ASK_AT_ONCE: Final = 16
# Evaluation goes before new training tasks: it is short, and a pinned version is only live for so long.
_ORDER: Final = ("partial", "eval", "p0", "p1")
assert set(_ORDER) == set(TASK_CLASSES)


class TaskQueue:
    """Leased tasks in class order. `next` takes a slot, `free` gives it back."""

    def __init__(self, context: Context, slots: int) -> None:
        self._context = context
        self._slots = slots
        self._used = 0
        self._freed = asyncio.Event()
        self._ready: dict[str, deque[Delivery]] = {name: deque() for name in _ORDER}
        self._arrived = asyncio.Event()
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._queues: dict[str, WorkQueue] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[TaskQueue]:
        bus = self._context.config.bus
        async with contextlib.AsyncExitStack() as stack:
            for name in _ORDER:
                queue = WorkQueue(
                    self._context.bus,
                    self._context.publisher,
                    "tasks",
                    f"tasks_{name}",
                    worker=self._context.identity.instance,
                    ack_wait_s=bus.ack_wait_s,
                    max_deliver=bus.max_deliver,
                    claims=self._context.claims,
                )
                self._queues[name] = await stack.enter_async_context(queue.open())
            try:
                yield self
            finally:
                await self.stop()

    def free(self) -> None:
        """A slot is empty again."""
        self._used -= 1
        self._freed.set()

    async def next(self, halted: asyncio.Event) -> Delivery | None:
        """The next task, as soon as there are a slot and a task; None once `halted` is set."""
        stop = asyncio.ensure_future(halted.wait())
        try:
            while not halted.is_set():
                if self._used >= self._slots:
                    self._freed.clear()
                    await _any(stop, self._freed)
                    continue
                if not any(self._ready.values()):
                    await self._ask()
                while not halted.is_set():
                    if (delivery := self._take()) is not None:
                        self._used += 1
                        return delivery
                    await self._wait(stop)
            return None
        finally:
            stop.cancel()

    async def rest(self, resumed: asyncio.Event) -> None:
        """Leases nothing until `resumed` is set. Requests that are under way end by themselves; what they bring goes back."""
        going_on = asyncio.ensure_future(resumed.wait())
        try:
            while not resumed.is_set():
                self._arrived.clear()
                await self._give_back()
                await _any(going_on, self._arrived)
        finally:
            going_on.cancel()

    def _take(self) -> Delivery | None:
        for name in _ORDER:
            if self._ready[name]:
                return self._ready[name].popleft()
        return None

    async def _ask(self) -> None:
        """Asks each class that has no waiting request, in order, for what it has now."""
        wanted = min(self._slots - self._used, _ASK_AT_ONCE)
        for name in _ORDER:
            if name in self._waiting:
                continue
            self._ready[name].extend(await self._queues[name].fetch(wanted, 0.0))
            if self._ready[name]:
                break

    async def _wait(self, stop: asyncio.Future[Literal[True]]) -> None:
        """Leaves one waiting request on each class and returns when one of them brought a task (or ended)."""
        self._arrived.clear()
        for name in _ORDER:
            if name not in self._waiting:
                self._waiting[name] = asyncio.create_task(self._await_one(name), name=f"waiting for {name} tasks")
        await _any(stop, self._arrived)

    async def _await_one(self, name: str) -> None:
        try:
            wait_s = self._context.config.bus.fetch_timeout_s * random.uniform(0.5, 1.5)  # never all workers at once
            self._ready[name].extend(await self._queues[name].fetch(1, wait_s))
        finally:
            del self._waiting[name]
            self._arrived.set()

    async def stop(self) -> None:
        """Leases nothing more, and gives back what was leased and not taken: others begin it now, not when a drain ends."""
        for task in self._waiting.values():
            task.cancel()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)
        await self._give_back()
        for queue in self._queues.values():
            await queue.stop()

    async def _give_back(self) -> None:
        for ready in self._ready.values():
            while ready:
                await ready.popleft().give_back()


async def _any(stop: asyncio.Future[Literal[True]], event: asyncio.Event) -> None:
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({stop, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
