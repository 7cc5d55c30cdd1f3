"""Who is there: each actor's heartbeat is a register value with a time to live, and everybody may watch.

One mechanism serves liveness and discovery: the newest heartbeat of an instance is stored (a newcomer reads them all at
once) and seen by core subscribers as it is published. An instance is gone when it says so, or after EXPIRY_S of silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of
from physarum.bus.errors import BusError, CodecError
from physarum.bus.names import RUN_HEADER
from physarum.bus.publisher import Publisher

_log = logging.getLogger(__name__)

EXPIRY_S: Final = 10
GONE: Final = "gone"
_SNAPSHOT_ENDS: Final = ("204", "404")


class Heartbeat(msgspec.Struct, kw_only=True):
    """One actor as it is now. `facts` are what others need (an engine's url and version); `numbers` are for people."""

    role: str
    instance: str
    state: str
    pid: int
    host: str
    started_at: float
    sequence: int
    loop_lag_s: float = 0.0
    progress_at: float = 0.0
    facts: dict[str, Any] = {}
    numbers: dict[str, float] = {}


async def announce(bus: Bus, publisher: Publisher, beat: Heartbeat, timeout_s: float = 5.0) -> None:
    """Publishes one heartbeat. A state of "gone" is the last one and expires at once."""
    subject = names.subject(bus.run, "presence", beat.role, beat.instance)
    ttl_s = 1 if beat.state == GONE else EXPIRY_S
    await publisher.publish(subject, encode(beat), ttl_s=ttl_s, deadline_s=timeout_s)


class Roster:
    """The live view of one role's (or everybody's) presence. `changed` is set at every arrival, change and departure."""

    def __init__(self, bus: Bus, role: str | None = None, on_change: Callable[[], None] | None = None) -> None:
        self._bus = bus
        self._pattern = f"ph.{bus.run}.presence.{role}.*" if role else names.all_subjects(bus.run, "presence")
        self._members: dict[tuple[str, str], Heartbeat] = {}
        self._seen_at: dict[tuple[str, str], float] = {}
        self._newest: dict[tuple[str, str], tuple[float, int]] = {}
        self._on_change = on_change
        self.changed = asyncio.Event()

    @property
    def members(self) -> list[Heartbeat]:
        """Everybody who is there, by role and instance."""
        return [self._members[key] for key in sorted(self._members)]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Roster]:
        subscription = await self._bus.subscribe(self._pattern, self._on_beat)
        tasks = [
            asyncio.create_task(self._expire(), name="roster expiry"),
            asyncio.create_task(self._reread(), name="roster reread"),
        ]
        try:
            await self._snapshot()
            yield self
        finally:
            for task in tasks:
                task.cancel()
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits for the next change; False when none came in time."""
        self.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def _snapshot(self) -> None:
        for message in await last_of(self._bus, names.stream(self._bus.run, "presence"), self._pattern):
            await self._on_beat(message)

    async def _on_beat(self, message: Msg) -> None:
        if not message.data or not self._bus.accept(dict(message.headers or {}), RUN_HEADER):
            return
        try:
            beat = decode(message.data, Heartbeat)
        except CodecError as error:
            _log.warning("unreadable heartbeat on %s: %s", message.subject, error)
            return
        key = (beat.role, beat.instance)
        age = (beat.started_at, beat.sequence)
        if age < self._newest.get(key, age):
            return  # a snapshot's answer may come after a newer beat, also after the last one
        self._newest[key] = age
        if beat.state == GONE:
            self._members.pop(key, None)
        else:
            self._members[key] = beat
            self._seen_at[key] = time.monotonic()
        self._notify()

    def forget(self, role: str, instance: str) -> None:
        """Drops a member that is known to be dead, without waiting for its expiry."""
        if self._members.pop((role, instance), None) is not None:
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        if self._on_change is not None:
            self._on_change()

    async def _expire(self) -> None:
        while True:
            if not self._bus.client.is_connected:
                await self._after_outage()
            deadlines = [self._seen_at[key] + EXPIRY_S for key in self._members]
            await asyncio.sleep(max(0.05, min(deadlines, default=time.monotonic() + EXPIRY_S) - time.monotonic()))
            if not self._bus.client.is_connected:
                continue
            now = time.monotonic()
            silent = [key for key in self._members if now - self._seen_at[key] >= EXPIRY_S]
            for key in silent:
                _log.warning("%s/%s has been silent for %d s and counts as gone", *key, EXPIRY_S)
                del self._members[key]
            if silent:
                self._notify()

    async def _after_outage(self) -> None:
        """While the bus is away nobody can be heard: silence counts from its return."""
        restored = self._bus.reconnections()
        if not self._bus.client.is_connected:
            await restored.wait()
        now = time.monotonic()
        self._seen_at = dict.fromkeys(self._seen_at, now)

    async def _reread(self) -> None:
        while True:
            await self._bus.reconnections().wait()
            try:
                await self._snapshot()
            except BusError as error:
                _log.warning("who is there could not be read again, heartbeats will tell: %s", error)
