"""Who is there: each actor's heartbeat is a register value with a time to live, and everybody may watch.

One mechanism serves liveness and discovery: the newest heartbeat of an instance is stored (a newcomer reads them all at
once) and seen by core subscribers as it is published. An instance is gone when it says so, or after EXPIRY_S of silence.

Who listens to one role takes part in the roll call (rollcall.py) while there is one: it hears then of changes only, from one
process. When that process is silent the stored heartbeats are read instead, each listener at a moment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from physarum.bus import names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of
from physarum.bus.errors import BusError, BusUnreachableError, CodecError
from physarum.bus.names import RUN_HEADER
from physarum.bus.publisher import Publisher

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

EXPIRY_S: Final = 10
GONE: Final = "gone"
RETELL_S: Final = 30.0
"""How often a roll call names a member of which there is no news; who was not named three times in a row is gone."""
TICK_S: Final = 2.0
"""How often there is a roll call when there is no news at all."""


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


class RollCall(msgspec.Struct, kw_only=True):
    """`beats`: members that came or changed, without what is for people only; `gone`: instances that left. `open` False: there
    are few members, listen to them yourself."""

    open: bool
    beats: list[Heartbeat] = []
    gone: list[str] = []


async def announce(bus: Bus, publisher: Publisher, beat: Heartbeat, timeout_s: float = 5.0) -> None:
    """Publishes one heartbeat. A state of "gone" is the last one and expires at once."""
    subject = names.subject(bus.run, "presence", beat.role, beat.instance)
    ttl_s = 1 if beat.state == GONE else EXPIRY_S
    await publisher.publish(subject, encode(beat), ttl_s=ttl_s, deadline_s=timeout_s)


class Roster:
    """The live view of one role's (or everybody's) presence. `changed` is set at every arrival, change and departure."""

    def __init__(
        self,
        bus: Bus,
        role: str | None = None,
        on_change: Callable[[], None] | None = None,
        on_beat: Callable[[Heartbeat], None] | None = None,
        named: bool = False,
    ) -> None:
        """`on_beat` is called with each heartbeat that is news, before `on_change`. `named`: only those of `listen_to`."""
        self._bus, self._role = bus, role
        everybody = f"ph.{bus.run}.presence.{role}.*" if role else names.all_subjects(bus.run, "presence")
        self._patterns = [] if named else [everybody]
        self._members: dict[tuple[str, str], Heartbeat] = {}
        self._seen_at: dict[tuple[str, str], float] = {}
        self._newest: dict[tuple[str, str], tuple[float, int]] = {}
        self._told_at: dict[tuple[str, str], float] = {}
        self._on_change, self._on_beat_news = on_change, on_beat
        self._direct: list[Subscription] | None = None
        self._called_at = 0.0
        self.changed = asyncio.Event()

    @property
    def members(self) -> list[Heartbeat]:
        """Everybody who is there, by role and instance."""
        return [self._members[key] for key in sorted(self._members)]

    def heard_of(self, role: str, instance: str, started_at: float) -> bool:
        """Whether this incarnation, or a later one, was ever a member here; one that just began may not be yet."""
        return self._newest.get((role, instance), (-math.inf, 0))[0] >= started_at

    @property
    def listens(self) -> bool:
        """Whether it hears each heartbeat itself, and is not told by a roll call."""
        return self._direct is not None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Roster]:
        await self._listen()
        calls = await self._listen_to_calls(self._role) if self._role else None
        tasks = [
            asyncio.create_task(self._expire(), name="roster expiry"),
            asyncio.create_task(self._reread(), name="roster reread"),
            asyncio.create_task(self._read_in_silence(), name="roster without a roll call"),
        ]
        try:
            await self._snapshot(self._patterns)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            if not self._bus.client.is_closed:
                for subscription in filter(None, (calls, *(self._direct or ()))):
                    await subscription.unsubscribe()

    async def listen_to(self, role: str, instance: str) -> None:
        """Of an open roster of `named` ones: this one, too. Waits for a bus that is away."""
        subject = names.subject(self._bus.run, "presence", role, instance)
        if subject in self._patterns or self._direct is None:
            return
        self._patterns.append(subject)
        while True:
            try:
                self._direct.append(await self._bus.subscribe(subject, self._on_beat))
                break
            except BusUnreachableError as error:  # no event says when a slow server is quick again
                _log.info("%s/%s cannot be listened to yet: %s", role, instance, error)
                await asyncio.sleep(TICK_S)
        await self._read_again([subject])

    async def _listen(self) -> None:
        self._direct = [await self._bus.subscribe(pattern, self._on_beat) for pattern in self._patterns]

    async def _listen_to_calls(self, role: str) -> Subscription:
        return await self._bus.subscribe(names.rollcall_subject(self._bus.run, role), self._on_call)

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits for the next change; False when none came in time."""
        self.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def _snapshot(self, patterns: Iterable[str]) -> None:
        """Takes in what is stored, and says so once."""
        stream = names.stream(self._bus.run, "presence")
        messages = [message for pattern in patterns for message in await last_of(self._bus, stream, pattern)]
        self._take_all(beat for message in messages if (beat := self._read(message, Heartbeat)) is not None)

    async def _on_beat(self, message: Msg) -> None:
        beat = self._read(message, Heartbeat)
        if beat is not None:
            self._take_all([beat])

    def _read(self, message: Msg, kind: type[T]) -> T | None:
        """None for what is empty, another run's or unreadable."""
        if not message.data or not self._bus.accept(dict(message.headers or {}), RUN_HEADER):
            return None
        try:
            return decode(message.data, kind)
        except CodecError as error:
            _log.warning("unreadable %s on %s: %s", kind.__name__, message.subject, error)
            return None

    def _take_all(self, beats: Iterable[Heartbeat], left: bool = False) -> None:
        """`left`: somebody has gone as well."""
        if sum([self._take(beat) for beat in beats]) or left:
            self._notify()

    def _take(self, beat: Heartbeat) -> bool:
        """Whether it is news: a snapshot's answer may come after a newer beat, also after the last one."""
        key = (beat.role, beat.instance)
        age, now = (beat.started_at, beat.sequence), time.monotonic()
        if age < self._newest.get(key, age) and not self._is_over(key, now):
            return False
        self._newest[key], self._told_at[key] = age, now
        if beat.state == GONE:
            self._members.pop(key, None)
        else:
            self._members[key] = beat
            self._seen_at[key] = now
        if self._on_beat_news is not None:
            self._on_beat_news(beat)
        return True

    def _is_over(self, key: tuple[str, str], now: float) -> bool:
        """Whether it left so long ago that nothing of it is stored any more: what is heard now is its successor, although its
        host's clock may say that it began before (another machine's is behind, or this one's was set)."""
        return key not in self._members and now - self._told_at[key] > EXPIRY_S

    async def _on_call(self, message: Msg) -> None:
        """The first one ends our own listening; the one that ends the roll call begins it again."""
        call = self._read(message, RollCall)
        if call is None:
            return
        self._called_at = time.monotonic()
        if not call.open:
            if self._direct is None:
                self._seen_at = dict.fromkeys(self._seen_at, self._called_at)
                await self._listen()
                await self._read_again(self._patterns)
            return
        if self._direct is not None:
            direct, self._direct = self._direct, None
            for subscription in direct:
                await subscription.unsubscribe()
        left = [name for name in call.gone if self._members.pop((str(self._role), name), None) is not None]
        self._take_all(call.beats, left=bool(left))

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
            limit_s = self._silence_s
            deadlines = [self._seen_at[key] + limit_s for key in self._members]
            await asyncio.sleep(max(0.05, min([*deadlines, time.monotonic() + EXPIRY_S]) - time.monotonic()))
            if not self._bus.client.is_connected:
                continue
            now, limit_s = time.monotonic(), self._silence_s
            silent = [key for key in self._members if now - self._seen_at[key] >= limit_s]
            for key in silent:
                _log.warning("%s/%s has been silent for %d s and counts as gone", *key, limit_s)
                del self._members[key]
            if silent:
                self._notify()

    @property
    def _silence_s(self) -> float:
        """After which a member counts as gone: in a roll call others watch, and name it less often."""
        return EXPIRY_S if self.listens else 3 * RETELL_S

    async def _read_in_silence(self) -> None:
        """Whoever held the roll call is gone: until the next one what is stored is read, by each listener at its own time."""
        while True:
            await asyncio.sleep(EXPIRY_S * random.uniform(0.5, 1.5))
            if not self.listens and time.monotonic() - self._called_at > 2 * TICK_S:
                await self._read_again(self._patterns)

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
            await self._read_again(self._patterns)

    async def _read_again(self, patterns: Iterable[str]) -> None:
        try:
            await self._snapshot(patterns)
        except BusError as error:
            _log.warning("who is there could not be read again, heartbeats will tell: %s", error)
