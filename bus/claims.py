"""Which leased messages a worker holds, written down so that a janitor can return them the moment the worker is gone.

The record is a hint, written at most every PERIOD_S; what was leased later than that before a death falls back on the
server's own `ack_wait`. A claim names the message's acknowledgement subject, on which anybody may return it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.2


class ClaimRecord(msgspec.Struct, frozen=True):
    """The claims of one process. `started_at` tells it from its successor of the same name (as in its heartbeat)."""

    role: str
    instance: str
    started_at: float
    acks: list[str]


def claim_key(role: str, instance: str, started_at: float) -> tuple[str, str, str]:
    """The register key of one process."""
    return role, instance, f"{started_at:.3f}"


class ClaimBook:
    """One process's claims; `keep` writes them while it runs."""

    def __init__(self, bus: Bus, publisher: Publisher, role: str, instance: str, started_at: float) -> None:
        self._register: Register[ClaimRecord] = Register(bus, publisher, "claims", ClaimRecord)
        self._who = (role, instance, started_at)
        self._acks: set[str] = set()
        self._changed = asyncio.Event()

    def add(self, acks: Iterable[str]) -> None:
        new = set(acks) - self._acks  # nothing, where a queue was empty: a thousand idle workers write nothing
        if new:
            self._acks |= new
            self._changed.set()

    def discard(self, ack: str) -> None:
        if ack in self._acks:
            self._acks.discard(ack)
            self._changed.set()

    async def keep(self) -> None:
        """Writes the claims whenever they changed, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._register.put(ClaimRecord(*self._who, sorted(self._acks)), *claim_key(*self._who))
            except BusError as error:
                _log.warning("claims not written, ack_wait stands in for them: %s", error)
            await asyncio.sleep(PERIOD_S)
