"""GET of a ticket for a version that is one file here: its memory is registered, and held as long as the lease lasts.

    GET ... reads ... DELETE    once nobody has a ticket the lease ends soon; who died with one keeps it until its time is over

Invariant: memory that others may read stays mapped and is not overwritten before its lease is over; then nobody has a ticket.
At most MOST versions are held so: each is a model's bytes beside those that the area counts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Final, Protocol

import msgspec
from aiohttp import web

from physarum.weightsync.answers import refusal
from physarum.weightsync.carriers.carrier import Carrier, Place
from physarum.weightsync.carriers.ticket import Ticket
from physarum.weightsync.errors import CarrierError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mappings import memory_of

_log = logging.getLogger(__name__)

LEASE_S: Final = 120.0
_MARGIN_S: Final = 30.0
"""For reads that began in time."""
MOST: Final = 2
IDLE_S: Final = 5.0
"""Whoever asks within it finds the memory registered."""


class Versions(Protocol):
    """A catalogue, or what a receiver holds."""

    def version(self, label: str) -> tuple[HeldFile, Manifest] | None:
        """A version that is complete in one file here."""


class _Lease:
    """One registered file."""

    def __init__(self, stack: ExitStack, place: Place, offsets: dict[str, int]) -> None:
        self.stack, self.place, self.offsets = stack, place, offsets
        self.tickets = 0
        """That were not given back."""
        self.timer: asyncio.TimerHandle | None = None


class Issuing:
    """The tickets of one holder, in one event loop. Without a carrier there are none."""

    def __init__(self, versions: Versions, carrier: Carrier | None) -> None:
        self._versions = versions
        self._carrier = carrier
        self._leases: dict[str, _Lease] = {}
        self._one_at_a_time = asyncio.Lock()

    async def get(self, request: web.Request) -> web.StreamResponse:
        label = request.match_info["label"]
        carrier = self._carrier
        if carrier is None:
            return refusal(404, "no carrier is configured here (checkpoint.carrier): chunks travel by HTTP")
        async with self._one_at_a_time:
            try:
                lease = self._leases.get(label)
                if lease is None and not self._has_place():
                    return refusal(503, f"{MOST} versions are being read here already: chunks travel by HTTP")
                lease = lease or await self._leased(label, carrier)
            except CarrierError as error:
                _log.warning("%s is not offered by %s: %s", label, carrier.name, error)
                return refusal(503, str(error))
            if lease is None:
                return refusal(404, f"version {label[:80]} is not here in one file")
            lease.tickets += 1
            self._lasts(label, lease, LEASE_S + _MARGIN_S)
        ticket = Ticket(label=label, carrier=carrier.name, place=lease.place, offsets=lease.offsets, lease_s=LEASE_S)
        return web.Response(body=msgspec.json.encode(ticket), content_type="application/json")

    async def give_back(self, request: web.Request) -> web.StreamResponse:
        """Of one ticket, by whoever reads no more by it."""
        label = request.match_info["label"]
        lease = self._leases.get(label)
        if lease is not None:
            lease.tickets = max(lease.tickets - 1, 0)
            if not lease.tickets:
                self._lasts(label, lease, IDLE_S)
        return web.Response(status=204)

    def _has_place(self) -> bool:
        for label in [label for label, lease in self._leases.items() if not lease.tickets]:
            self._end(label)
        return len(self._leases) < MOST

    async def _leased(self, label: str, carrier: Carrier) -> _Lease | None:
        found = self._versions.version(label)
        if found is None:
            return None
        file, manifest = found
        with ExitStack() as stack:
            if not stack.enter_context(file.using()):
                return None
            memory = memoryview(memory_of(file.descriptor, writable=True))  # a network card takes no read-only memory
            place = await asyncio.to_thread(carrier.register, memory)
            stack.callback(memory.release)
            stack.callback(carrier.unregister, place)
            offsets = {tensor.name: file.offset(tensor.name) for tensor in manifest.tensors}
            lease = self._leases[label] = _Lease(stack.pop_all(), place, offsets)
        return lease

    def _lasts(self, label: str, lease: _Lease, seconds: float) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = asyncio.get_running_loop().call_later(seconds, self._end, label)

    def _end(self, label: str) -> None:
        lease = self._leases.pop(label)
        if lease.timer is not None:
            lease.timer.cancel()
        lease.stack.close()

    async def close(self, app: web.Application) -> None:
        """A handler of the application's clean-up."""
        for label in list(self._leases):
            self._end(label)
