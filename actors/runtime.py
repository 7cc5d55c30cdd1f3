"""The life of one actor process: connect, announce, serve control, work, drain, say goodbye.

        SIGTERM / control drain ---> draining ---> run() returns ---> "gone" ---> exit 0
        error in run() ------------> last line names it -------------> "gone" ---> exit 1 (restart) or 78 (do not)
        SIGTERM a second time, control stop --------------------------> cancelled -> exit 0

Torch never runs on this loop; a loop that is blocked shows in the heartbeat's lag.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from nats.micro.service import Service

from physarum.actors.context import Context
from physarum.actors.cordons import is_cordoned
from physarum.actors.orphanhood import until_orphaned
from physarum.actors.watchdog import Watchdog
from physarum.bus import control
from physarum.bus.errors import BusError
from physarum.bus.presence import EXPIRY_S, GONE, Heartbeat, announce

_log = logging.getLogger(__name__)

_ENDING: Final = ("draining", "finishing", "finished")
PAUSED: Final = "paused"
_LAG_PROBE_S: Final = 0.25


class Actor(abc.ABC):
    """One role. Subclasses set `role`, implement `run` and keep `facts` and `numbers` current."""

    role: ClassVar[str]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = context.config
        self.bus = context.bus
        self.publisher = context.publisher
        self.state = "starting"
        self.behind_pause = self.state
        """What it would be if it were not paused."""
        self.facts: dict[str, Any] = {}
        self.numbers: dict[str, float] = {}
        self.progress_at = time.time()
        self._announce_now = asyncio.Event()

    @abc.abstractmethod
    async def run(self) -> None:
        """The actor's work. Returns when it is finished, or after `context.draining` was set and nothing is held."""

    def verbs(self) -> Mapping[str, control.Verb]:
        """What this role answers on its control service beside what every actor does."""
        return {}

    @property
    def own_state(self) -> str:
        """The state that it is in, whether or not it is paused meanwhile."""
        return self.behind_pause if self.state == PAUSED else self.state

    def become(self, state: str) -> None:
        """Changes the announced state, at once. An actor that drains is not made ready again by what it was at, and one that is
        paused not before it is resumed."""
        if self.context.draining.is_set() and state not in _ENDING:
            return
        if self.context.paused and state not in (*_ENDING, PAUSED):
            self.behind_pause = state
            return
        if state != self.state:
            _log.info("%s: %s -> %s", self.context.identity, self.state, state)
            self.state = state
        self._announce_now.set()

    def announce(self) -> None:
        """Publishes the current facts with the next heartbeat, which comes at once."""
        self._announce_now.set()

    def progressed(self) -> None:
        self.progress_at = time.time()


class Runtime:
    """Runs one actor to its end."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._context = actor.context
        self._beats = 0
        self._lag_s = 0.0
        self._work: asyncio.Task[None] | None = None

    async def main(self) -> None:
        """Raises what the actor's `run` raised; a cancelled run (stop) returns."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        await self._context.heartbeat_publisher.start()
        await self._beat()
        helpers = [
            asyncio.create_task(self._heartbeats(), name="heartbeats"),
            asyncio.create_task(self._measure_lag(), name="event-loop lag"),
            asyncio.create_task(self._watch_orphanhood(), name="orphan watch"),
            asyncio.create_task(self._context.claims.keep(), name="claims"),
        ]
        service = await self._serve_control()
        watchdog = Watchdog()
        watchdog.start()
        try:
            if await is_cordoned(self._context.bus, self._context.publisher, self._context.identity.instance):
                self._pause()
            self._work = asyncio.create_task(self._actor.run(), name=str(self._context.identity))
            await _until_done(self._work, helpers)
        finally:
            watchdog.stop()
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._goodbye(service)

    def _on_signal(self) -> None:
        if self._context.draining.is_set():
            _log.warning("stopping at once: asked a second time")
            self.stop()
        else:
            self.drain()

    def drain(self) -> None:
        self._actor.become("draining")
        self._context.drain()

    def _pause(self) -> None:
        if not self._context.paused:
            self._actor.behind_pause = self._actor.state
        self._context.pause()
        self._actor.become(PAUSED)

    def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _serve_control(self) -> Service:
        async def status(body: dict[str, Any]) -> dict[str, Any]:
            return self._status()

        async def pause(body: dict[str, Any]) -> dict[str, Any]:
            self._pause()
            return self._status()

        async def resume(body: dict[str, Any]) -> dict[str, Any]:
            self._context.resume()
            self._actor.become(self._actor.behind_pause)
            return self._status()

        async def drain(body: dict[str, Any]) -> dict[str, Any]:
            self.drain()
            return self._status()

        async def stop(body: dict[str, Any]) -> dict[str, Any]:
            asyncio.get_running_loop().call_soon(self.stop)
            return self._status()

        async def dump(body: dict[str, Any]) -> dict[str, Any]:
            return {**self._status(), "tasks": sorted(_describe(task) for task in asyncio.all_tasks())}

        identity = self._context.identity
        verbs: dict[str, control.Verb] = {"status": status, "pause": pause, "resume": resume}
        verbs |= {"drain": drain, "stop": stop, "dump": dump, **self._actor.verbs()}
        return await control.serve(self._context.bus, identity.role, identity.instance, verbs)

    def _status(self) -> dict[str, Any]:
        beat = self._heartbeat()
        return {name: getattr(beat, name) for name in beat.__struct_fields__}

    def _heartbeat(self, state: str | None = None) -> Heartbeat:
        identity = self._context.identity
        return Heartbeat(
            role=identity.role,
            instance=identity.instance,
            state=state or self._actor.state,
            pid=os.getpid(),
            host=self._context.host,
            started_at=self._context.started_at,
            sequence=self._beats,
            loop_lag_s=round(self._lag_s, 4),
            progress_at=self._actor.progress_at,
            facts=self._actor.facts,
            numbers=self._actor.numbers,
        )

    async def _beat(self, state: str | None = None) -> None:
        self._beats += 1
        publisher = self._context.heartbeat_publisher
        try:
            await announce(self._context.bus, publisher, self._heartbeat(state), timeout_s=EXPIRY_S / 2)
        except BusError as error:
            _log.warning("heartbeat not stored: %s", error)

    async def _heartbeats(self) -> None:
        period_s = self._context.config.supervisor.heartbeat_s
        while True:
            self._actor._announce_now.clear()
            await self._beat()
            try:
                async with asyncio.timeout(period_s):
                    await self._actor._announce_now.wait()
            except TimeoutError:
                continue

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PROBE_S
            await asyncio.sleep(_LAG_PROBE_S)
            self._lag_s = max(loop.time() - due, self._lag_s * 0.8)

    async def _watch_orphanhood(self) -> None:
        """Drains when nobody would ever stop us."""
        reason = await until_orphaned(self._context)
        _log.error("%s: draining", reason)
        self.drain()

    async def _goodbye(self, service: Service) -> None:
        await self._beat(GONE)
        try:
            async with asyncio.timeout(2.0):
                await service.stop()
        except (TimeoutError, OSError) as error:
            _log.debug("control service not unregistered: %r", error)


async def _until_done(work: asyncio.Task[None], helpers: list[asyncio.Task[None]]) -> None:
    """Waits for the work; a helper that ends with an error ends the actor too, with that error."""
    done, _ = await asyncio.wait({work, *helpers}, return_when=asyncio.FIRST_COMPLETED)
    while work not in done:
        for task in done:
            if task.exception() is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                task.result()
        helpers = [task for task in helpers if task not in done]
        done, _ = await asyncio.wait({work, *helpers}, return_when=asyncio.FIRST_COMPLETED)
    if work.cancelled():
        _log.warning("stopped before its work was finished")
        return
    work.result()


def _describe(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
    return f"{task.get_name()} at {where}"
