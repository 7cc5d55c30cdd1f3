"""Leases with fencing tokens: who may act for a role that only one may have.

A lease is a register key with a time to live, renewed by a thread and connection of its own, so that a busy event loop
does not lose it. The fencing token is a counter that grows at every acquisition; whoever stores something compares it,
so an old owner that wakes up late is refused where it matters, not by its own clock.

A holder that was killed is replaced by a process of the same machine at once: the record says which process holds it,
and the kernel says that it has ended. Elsewhere, and for a machine that is gone, the time to live decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import BusError, BusUnreachableError, LeaseLostError, PublishTimeoutError, WrongSequenceError
from physarum.bus.process_identity import ProcessIdentity, own
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

TTL_S: Final = 10
RENEW_S: Final = 2.0
# The server announces no expiry: once a holder was silent for TTL_S its key is looked at this often.
_EXPIRY_LOOK_S: Final = 0.25


class LeaseRecord(msgspec.Struct, frozen=True):
    """Who holds the lease, under which token, in which process."""

    owner: str
    token: int
    acquired_at: float
    process: ProcessIdentity | None = None


class Counter(msgspec.Struct, frozen=True):
    value: int


class Lease:
    """A held lease. `token` is its fencing token; `lost` is set (from any thread) once it cannot be renewed."""

    def __init__(self, name: str, record: LeaseRecord, keeper: _Keeper) -> None:
        self.name = name
        self.token = record.token
        self.lost = keeper.lost
        self._keeper = keeper

    def check(self) -> None:
        """Raises LeaseLostError once the lease is not ours any more: stop acting under it."""
        if self.lost.is_set():
            raise LeaseLostError(
                f"lease {self.name} (token {self.token}) was lost: it was not renewed for {TTL_S} s or another owner took"
                " it. This process must stop; a new one continues from the last durable state"
            )

    async def release(self) -> None:
        """Gives the lease up at once, so that a standby need not wait for its expiry."""
        await asyncio.to_thread(self._keeper.stop)


async def acquire(
    endpoint: Endpoint, bus: Bus, publisher: Publisher, name: str, owner: str, on_lost: Callable[[], None] | None = None
) -> Lease:
    """Waits until the lease is free, takes it and starts its renewal. Cancel to give up waiting.

    `on_lost` is called from the keeper's thread. Raises LeaseLostError when the lease is lost before it was usable.
    """
    leases = Register(bus, publisher, "lease", LeaseRecord)
    revision = await _take(leases, name, owner)
    record = LeaseRecord(owner, await _next_token(bus, publisher, name), time.time(), own())
    keeper = _Keeper(endpoint, bus.run, name, record, revision, on_lost)
    try:
        await asyncio.to_thread(keeper.start)
    except BaseException:
        keeper.signal_stop()
        raise
    _log.info("lease %s taken with token %d", name, record.token)
    return Lease(name, record, keeper)


async def _take(leases: Register[LeaseRecord], name: str, owner: str) -> int:
    """Waits for the key to be free, or its holder dead, and writes it; returns the revision of exactly that write."""
    async with leases.watch(name) as changed:
        look_again_s: float = TTL_S
        while True:
            with contextlib.suppress(WrongSequenceError, PublishTimeoutError, BusUnreachableError):
                entry = await leases.get(name)
                if entry.value is None or _holder_is_dead(name, entry.value):
                    return await leases.compare_and_set(
                        LeaseRecord(owner, 0, time.time(), own()), entry.revision, name, ttl_s=TTL_S
                    )
            # The holder's renewals wake us; its silence does after a full TTL.
            look_again_s = TTL_S if await _first(changed, look_again_s) else _EXPIRY_LOOK_S
            changed.clear()


def _holder_is_dead(name: str, record: LeaseRecord) -> bool:
    if record.process is None or not record.process.known_dead:
        return False
    _log.warning(
        "lease %s: its holder %s (pid %d) has ended without releasing it", name, record.owner, record.process.pid
    )
    return True


async def _first(changed: asyncio.Event, timeout_s: float) -> bool:
    """Whether `changed` was set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await changed.wait()
    except TimeoutError:
        return False


async def _next_token(bus: Bus, publisher: Publisher, name: str) -> int:
    """Counts up under compare-and-set, so every token is given once and later ones are larger."""
    counters = Register(bus, publisher, "run", Counter)
    while True:
        entry = await counters.get("epoch", name)
        value = 1 if entry.value is None else entry.value.value + 1
        try:
            await counters.compare_and_set(Counter(value), entry.revision, "epoch", name)
        except WrongSequenceError:
            continue
        return value


class _Keeper:
    """Renews one lease every RENEW_S from its own thread, event loop and connection.

    Invariant: the thread ends either because it was told to (`signal_stop`), or with `lost` set.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: str,
        name: str,
        record: LeaseRecord,
        revision: int,
        on_lost: Callable[[], None] | None,
    ) -> None:
        self.lost = threading.Event()
        self._endpoint, self._run, self._name = endpoint, run, name
        self._record, self._revision, self._on_lost = record, revision, on_lost
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._main, name=f"lease {name}", daemon=True)

    def start(self) -> None:
        """Returns once the first renewal succeeded; raises LeaseLostError when it did not."""
        self._thread.start()
        if not self._ready.wait(TTL_S) or self.lost.is_set():
            raise LeaseLostError(f"lease {self._name}: the first renewal failed or took longer than {TTL_S} s")

    def stop(self) -> None:
        self.signal_stop()
        self._thread.join(timeout=TTL_S)

    def signal_stop(self) -> None:
        self._stopping.set()
        if self._loop is not None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._wake.set)

    def _main(self) -> None:
        try:
            asyncio.run(self._keep())
        except (BusError, OSError) as error:
            _log.error("lease %s: %s", self._name, error)
        finally:
            if not self._stopping.is_set():
                self.lost.set()
                if self._on_lost is not None:
                    self._on_lost()
            self._ready.set()

    async def _keep(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        bus = await Bus.connect(self._endpoint, self._run, f"lease-{self._name}", deadline_s=TTL_S / 2)
        try:
            publisher = await Publisher(bus).start()
            leases = Register(bus, publisher, "lease", LeaseRecord)
            counters = Register(bus, publisher, "run", Counter)
            await self._renew(leases)
            self._ready.set()
            while not self._stopping.is_set():
                await _first(self._wake, RENEW_S)
                if not self._stopping.is_set() and not await self._still_ours(leases, counters):
                    return
            await leases.clear(self._revision, self._name)
        finally:
            await bus.close()

    async def _still_ours(self, leases: Register[LeaseRecord], counters: Register[Counter]) -> bool:
        try:
            await self._renew(leases)
        except WrongSequenceError as error:
            _log.warning("lease %s is not as it was left: %s", self._name, error)
            return await self._retake(leases, counters)
        except BusError as error:
            # The bus is away for everybody, and storage fences us by token: we go on trying.
            _log.warning("lease %s not renewed: %s", self._name, error)
        return True

    async def _renew(self, leases: Register[LeaseRecord]) -> None:
        self._revision = await leases.compare_and_set(self._record, self._revision, self._name, ttl_s=TTL_S)

    async def _retake(self, leases: Register[LeaseRecord], counters: Register[Counter]) -> bool:
        """After an outage: ours again if nobody took it meanwhile, which the token counter tells.

        The key alone does not: a second owner may have taken the lease and released it again.
        """
        try:
            entry, newest = await leases.get(self._name), await counters.get("epoch", self._name)
            ours = entry.value is None or (entry.value.owner, entry.value.token) == (
                self._record.owner,
                self._record.token,
            )
            if not ours or newest.value is None or newest.value.value != self._record.token:
                _log.error("lease %s (token %d) was taken over", self._name, self._record.token)
                return False
            self._revision = entry.revision
            await self._renew(leases)
        except WrongSequenceError:
            _log.error("lease %s (token %d) was taken over", self._name, self._record.token)
            return False
        except BusError as error:
            _log.warning("lease %s not renewed: %s", self._name, error)
        return True
