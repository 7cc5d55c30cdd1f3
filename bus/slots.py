"""A bounded number of places that processes of a run take and give back: slot n of a name is one key of the LEASE register.

Invariant: at most `capacity` slots are held, and each by one process: who takes one writes its key over the revision that was
read as free. That write's sequence is the slot's fencing token: it grows with every taking of any slot. A slot ends when it is
given back, or with its holder: one whose presence is gone, or whose process is known to have ended, holds nothing. One that was
only thought gone hears that its slot was taken (`lost`).

No slot is renewed, so holding thousands costs nothing; who waits looks again when a slot or a presence has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of, subject_of
from physarum.bus.errors import BusError, NoSlotError, WrongSequenceError
from physarum.bus.presence import EXPIRY_S, Roster
from physarum.bus.process_identity import ProcessIdentity, own
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

_FAMILY: Final = "slot"
_WANTED: Final = "wanted"
_AGAIN_S: Final = 1.0


class Holder(NamedTuple):
    """A process as its heartbeat names it."""

    role: str
    instance: str
    started_at: float


class SlotRecord(msgspec.Struct, frozen=True):
    """Who holds a slot, since when (Unix seconds)."""

    role: str
    instance: str
    started_at: float
    at: float
    process: ProcessIdentity | None = None

    @property
    def holder(self) -> Holder:
        return Holder(self.role, self.instance, self.started_at)


class Slot:
    """A held slot. `lost` is set once another process has it."""

    def __init__(self, number: int, token: int) -> None:
        self.number, self.token = number, token
        self.lost = asyncio.Event()


class Slots:
    """Slots 0 to `capacity` - 1 of one name, as one process takes them. `notify` is to be called when `roster` changes."""

    def __init__(
        self, bus: Bus, publisher: Publisher, name: str, capacity: int, holder: Holder, roster: Roster
    ) -> None:
        self._bus, self._name, self._capacity, self._me, self._roster = bus, name, capacity, holder, roster
        self._register = Register(bus, publisher, "lease", SlotRecord)
        self._held: dict[int, Slot] = {}
        self._taking: set[int] = set()
        self._changed = asyncio.Event()
        self._giving: set[asyncio.Task[None]] = set()
        self._doubtful = False
        self._process, self._turn = own(), asyncio.Lock()
        self.wanted = asyncio.Event()
        """Set when another process waits for a slot; for the reader to clear."""

    @property
    def held(self) -> int:
        return len(self._held)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Slots]:
        subject = names.changed_subject(self._bus.run, "lease", _FAMILY, self._name)
        subscription = await self._bus.subscribe(f"{subject}.*", self._on_change)
        rereading = asyncio.create_task(self._reread(), name=f"slots of {self._name}")
        try:
            yield self
        finally:
            rereading.cancel()
            await asyncio.gather(rereading, *self._giving, return_exceptions=True)
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    def notify(self) -> None:
        """Somebody came or went: a slot may be free."""
        self._changed.set()

    async def acquire(self, timeout_s: float) -> Slot:
        """Waits until a slot is free, and takes it. Raises NoSlotError naming who has them, or BusError."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turn:  # one of this process looks; the others come after it, in order
                    while True:
                        self._changed.clear()
                        slot = await self._take_or_leave()
                        if slot is not None:
                            return slot
                        await self._ask()
                        await self._wait()
        except TimeoutError:
            raise NoSlotError(
                f"no place of {self._name} was free within {timeout_s:g} s: all {self._capacity} are held"
                f" ({self.held} by this process). Raise its capacity, or wait longer"
            ) from None

    async def try_acquire(self) -> Slot | None:
        """A slot that is free now; None where none is, or somebody here waits for one. Raises BusError."""
        return None if self._turn.locked() else await self._take_or_leave()

    async def release(self, slot: Slot) -> None:
        """Gives a slot back; one that was lost is not ours to give. Raises BusError: it is then ours to take again."""
        if self._held.get(slot.number) is slot:
            del self._held[slot.number]
        try:
            await self._register.clear(slot.token, _FAMILY, self._name, str(slot.number))
        except (BusError, asyncio.CancelledError):
            self._doubtful = True
            raise

    async def records(self) -> dict[int, SlotRecord]:
        """Who is recorded to hold which slot, alive or not."""
        return {number: record for number, (_, record) in (await self._read()).items() if record is not None}

    async def _take_or_leave(self) -> Slot | None:
        """A caller that is cancelled meanwhile holds none."""
        taking = asyncio.ensure_future(self._take())
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._unwanted)
            raise

    async def _take(self) -> Slot | None:
        found = await self._read()
        alive = {Holder(beat.role, beat.instance, beat.started_at) for beat in self._roster.members}
        free = [number for number in range(self._capacity) if self._is_free(number, found, alive)]
        random.shuffle(free)  # processes that look at the same time seldom meet
        for number in free:
            if number in self._held or number in self._taking:
                continue
            slot = await self._write(number, found.get(number, (0, None))[0])
            if slot is not None:
                return slot
        return None

    async def _write(self, number: int, revision: int) -> Slot | None:
        record = SlotRecord(*self._me, time.time(), self._process)
        self._taking.add(number)
        try:
            token = await self._register.compare_and_set(record, revision, _FAMILY, self._name, str(number))
        except WrongSequenceError:
            return None
        except BusError:
            self._doubtful = True
            raise
        finally:
            self._taking.discard(number)
        slot = self._held[number] = Slot(number, token)
        return slot

    def _is_free(self, number: int, found: dict[int, tuple[int, SlotRecord | None]], alive: set[Holder]) -> bool:
        record = found.get(number, (0, None))[1]
        if record is None:
            return True
        if (
            record.holder == self._me
        ):  # written by us, and what came of it was never heard: not while we hold or take it
            return number not in self._held and number not in self._taking
        if record.process is not None and record.process.known_dead:
            return True
        if record.holder in alive:
            return False
        # Its first heartbeat came before it took anything, but where a roll call tells of it, it may be heard after that.
        return self._roster.heard_of(*record.holder) or abs(time.time() - record.at) > EXPIRY_S

    async def _read(self) -> dict[int, tuple[int, SlotRecord | None]]:
        """Revision and record of each slot that was ever taken; None: given back."""
        pattern = f"{self._register.subject(_FAMILY, self._name)}.*"
        found: dict[int, tuple[int, SlotRecord | None]] = {}
        for message in await last_of(self._bus, names.stream(self._bus.run, "lease"), pattern):
            number = int(subject_of(message).rpartition(".")[2])
            revision = int((message.headers or {})["Nats-Sequence"])
            found[number] = (revision, decode(message.data, SlotRecord) if message.data else None)
        return found

    async def _ask(self) -> None:
        """Lets those who keep slots in reserve know that one is waited for."""
        subject = names.changed_subject(self._bus.run, "lease", _FAMILY, self._name, _WANTED)
        await self._bus.client.publish(subject, self._me.instance.encode())

    async def _wait(self) -> None:
        """For a change; a holder that falls silent is one after EXPIRY_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXPIRY_S):
                await self._changed.wait()

    async def _on_change(self, message: Msg) -> None:
        last = message.subject.rpartition(".")[2]
        if last == _WANTED:
            if message.data != self._me.instance.encode():
                self.wanted.set()
                if self._doubtful:
                    self._beside(self._settle())
            return
        sequence = int((message.headers or {}).get("Nats-Sequence", 0))
        slot = self._held.get(int(last))
        if slot is not None and sequence > slot.token:
            self._lose(slot)
        self._changed.set()

    async def _reread(self) -> None:
        """After an outage: what happened meanwhile was not heard."""
        while True:
            await self._bus.reconnections().wait()
            self._changed.set()
            found = await self._read_for_sure()
            for number, slot in list(self._held.items()):
                if found.get(number, (0, None))[0] != slot.token:
                    self._lose(slot)

    async def _read_for_sure(self) -> dict[int, tuple[int, SlotRecord | None]]:
        """No event says when a server that is back serves its streams again, and what was lost must be heard of."""
        while True:
            try:
                return await self._read()
            except BusError as error:
                _log.warning("slots of %s cannot be read after an outage, trying again: %s", self._name, error)
                await asyncio.sleep(_AGAIN_S)

    async def _settle(self) -> None:
        """Somebody waits: gives back what is recorded as ours and is not, since a write's answer was never heard."""
        self._doubtful = False
        try:
            for number, (revision, record) in (await self._read()).items():
                ours = record is not None and record.holder == self._me
                if ours and number not in self._held and number not in self._taking:
                    await self._register.clear(revision, _FAMILY, self._name, str(number))
        except BusError as error:
            self._doubtful = True
            _log.warning("slots of %s that this process may have left are not given back yet: %s", self._name, error)

    def _lose(self, slot: Slot) -> None:
        _log.error("slot %d of %s (token %d) was taken over", slot.number, self._name, slot.token)
        self._held.pop(slot.number, None)
        slot.lost.set()

    def _unwanted(self, taking: asyncio.Future[Slot | None]) -> None:
        if not taking.cancelled() and taking.exception() is None and (slot := taking.result()) is not None:
            self._beside(self._give(slot))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"slots of {self._name}")
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def _give(self, slot: Slot) -> None:
        try:
            await self.release(slot)
        except BusError as error:
            _log.warning("slot %d of %s is not given back yet: %s", slot.number, self._name, error)
