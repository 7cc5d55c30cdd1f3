"""Instances that episodes lease: started before they are asked for, handed from one to the next, closed when they idle.

    lease -> an idle instance, else a slot on the bus (bus/slots.py) and a start -> the episode -> idle again, or closed

Invariant: an instance exists only on a held slot, so that there are never more than `capacity` of them in the run; a slot is
given back after its instance was closed. An instance whose episode failed, or whose slot was lost, serves nobody else.
Where another worker waits, nothing is kept in reserve here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from physarum.agents.contained import contained
from physarum.agents.environments.lease import (
    EnvironmentStartError,
    Instance,
    Leased,
    NoEnvironmentError,
    Place,
    ends_when_lost,
)
from physarum.bus.errors import BusError, NoSlotError
from physarum.bus.slots import Slot, Slots
from physarum.configs.environments import EnvironmentClass

_log = logging.getLogger(__name__)

Start = Callable[[Place], Awaitable[Instance]]


class _Running:
    def __init__(self, instance: Instance, slot: Slot) -> None:
        self.instance, self.slot = instance, slot
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class EnvironmentPool:
    """One class in one worker."""

    def __init__(self, name: str, config: EnvironmentClass, slots: Slots, start: Start) -> None:
        self._name, self._config, self._slots, self._start = name, config, slots, start
        self._idle: list[_Running] = []
        self._waiting: deque[asyncio.Future[_Running]] = deque()
        self._beside: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = self._owed = self._warming = False
        self.leased = 0

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def slots(self) -> Slots:
        return self._slots

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[EnvironmentPool]:
        """Starts what is to be warm, and closes what idles at the end; leases end before."""
        async with self._slots.open():
            self._begin(self._beside, self._yield_to_others())
            self._prewarm()
            try:
                yield self
            finally:
                self._closing = True
                for task in self._beside:
                    task.cancel()
                await asyncio.gather(*self._beside, return_exceptions=True)
                for running in self._emptied():
                    self._end(running)
                while self._ending:
                    await asyncio.wait(self._ending)

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Leased]:
        """An instance for the block. Raises NoEnvironmentError, EnvironmentStartError, and EnvironmentLostError in the place of
        the block's end when the place is lost meanwhile. Who is cancelled does not wait until the instance is closed: a
        worker that drains has tokens to hand over before it is killed."""
        running = await self._taken()
        self._prewarm()
        well = hurried = False
        self.leased += 1
        try:
            async with ends_when_lost(running.slot, self._name):
                yield Leased(running.instance, self._place(running.slot))
            well = True
        except asyncio.CancelledError:
            hurried = True
            raise
        finally:
            self.leased -= 1
            if not (well and self._config.reuse and self._kept(running)):
                ended = self._end(running)
                if not hurried:
                    await asyncio.shield(ended)

    async def _taken(self) -> _Running:
        """An idle instance, or one that is given back meanwhile, or a place and a new one."""
        while self._idle:
            running = self._idle.pop()
            running.wake()
            if not running.slot.lost.is_set():
                return running
            self._end(running)
        handed: asyncio.Future[_Running] = asyncio.get_running_loop().create_future()
        slot = asyncio.ensure_future(self._slots.acquire(self._config.wait_s))
        self._waiting.append(handed)
        try:
            either: set[asyncio.Future[Any]] = {handed, slot}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._drop(slot)
            if handed.done() and not self._kept(handed.result()):
                self._end(handed.result())
            raise
        finally:
            with contextlib.suppress(ValueError):  # whoever handed it over took it out
                self._waiting.remove(handed)
        if handed.done():
            self._drop(slot)
            return handed.result()
        try:
            return await self._started(slot.result())
        except NoSlotError as error:
            raise NoEnvironmentError(f"environments.{self._name}: {error}") from error

    async def _started(self, slot: Slot) -> _Running:
        place = self._place(slot)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                return _Running(await contained(self._start(place)), slot)
        except asyncio.CancelledError:
            self._begin(self._ending, self._release(slot))
            raise
        except Exception as error:
            await asyncio.shield(self._begin(self._ending, self._release(slot)))
            why = f"{type(error).__name__}: {error}" if str(error) else f"not within {self._config.start_timeout_s:g} s"
            raise EnvironmentStartError(
                f"environments.{self._name}: place {place.number} did not start: {why}"
            ) from error

    def _kept(self, running: _Running) -> bool:
        """Handed to an episode that waits here, or left idle; False: it is to be closed."""
        if running.slot.lost.is_set() or self._closing or self._owed:
            return False
        while self._waiting:
            handed = self._waiting.popleft()
            if not handed.done():
                handed.set_result(running)
                return True
        loop = asyncio.get_running_loop()
        running.timer = loop.call_later(self._config.idle_ttl_s, self._expired, running)
        self._idle.append(running)
        return True

    def _expired(self, running: _Running) -> None:
        if running in self._idle:
            self._idle.remove(running)
            self._end(running)

    def _end(self, running: _Running) -> asyncio.Task[None]:
        """Its place is given back, which is all that another worker was owed."""
        running.wake()
        self._owed = False
        return self._begin(self._ending, self._ended(running))

    async def _ended(self, running: _Running) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await contained(running.instance.close())
        except Exception as error:  # noqa: BLE001 - a user's instance may raise anything; its place is not lost over it
            _log.error("environments.%s: place %d did not close: %r", self._name, running.slot.number, error)
        await self._release(running.slot)

    async def _release(self, slot: Slot) -> None:
        try:
            await self._slots.release(slot)
        except BusError as error:
            _log.warning("environments.%s: place %d is not given back yet: %s", self._name, slot.number, error)

    def _prewarm(self) -> None:
        due = self._config.prewarm > len(self._idle) and not self._closing and not self._owed
        if due and not self._warming:  # two at a time would start more than are wanted
            self._warming = True
            self._begin(self._beside, self._warm())

    async def _warm(self) -> None:
        """Up to `prewarm`, as far as places are free."""
        try:
            await self._warm_up()
        finally:
            self._warming = False

    async def _warm_up(self) -> None:
        while len(self._idle) < self._config.prewarm and not self._owed:
            try:
                slot = await self._slots.try_acquire()
                if slot is None:
                    return
                running = await self._started(slot)
            except (BusError, EnvironmentStartError) as error:
                _log.warning("environments.%s: nothing more is kept warm for now: %s", self._name, error)
                return
            if len(self._idle) >= self._config.prewarm or not self._kept(running):
                self._end(running)

    async def _yield_to_others(self) -> None:
        """When another worker waits, what idles here is closed; where nothing does, what comes back next is."""
        while True:
            await self._slots.wanted.wait()
            self._slots.wanted.clear()
            idle = self._emptied()
            self._owed = not idle
            for running in idle:
                self._end(running)

    def _emptied(self) -> list[_Running]:
        found, self._idle = self._idle, []
        return found

    def _place(self, slot: Slot) -> Place:
        return Place(self._name, slot.number, slot.token)

    def _drop(self, slot: asyncio.Future[Slot]) -> None:
        """A place that is not needed any more, also if it comes later."""

        def unwanted(done: asyncio.Future[Slot]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._begin(self._ending, self._release(done.result()))

        slot.cancel()
        slot.add_done_callback(unwanted)

    def _begin(self, where: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"environments.{self._name}")
        where.add(task)
        task.add_done_callback(where.discard)
        return task
