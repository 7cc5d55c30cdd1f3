"""A machine's name belongs to one supervisor: a second one, on whatever host, is refused by the first one's name.

So is a second head, as a host would be on which somebody forgot to say which machine it is.

The lock of the run folder says so within a host; folders of different hosts need not be the same one. A supervisor that was
killed is replaced at once on its own host, and after the lease's time to live on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Final

from physarum.actors.supervising import supervisor_on
from physarum.actors.supervisor.errors import MachineHeldError
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.lease import TTL_S, Lease, LeaseRecord, acquire
from physarum.bus.process_identity import own
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.machines import HEAD

_log = logging.getLogger(__name__)

_MARGIN_S: Final = 5.0
_AGAIN_S: Final = 1.0


class MachineLease:
    """Of one machine of a run."""

    def __init__(self, bus: Bus, publisher: Publisher, machine: str) -> None:
        self._bus, self._publisher, self._machine = bus, publisher, machine
        self._name = f"machine-{machine}"
        self._owner = f"{supervisor_on(machine)} on {socket.gethostname()}"
        self._lost = asyncio.Event()
        self._lease: Lease | None = None

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Raises MachineHeldError where another supervisor has it."""
        self._lease = await self._taken()
        try:
            yield
        finally:
            if self._lease is not None:
                await self._lease.release()

    async def keep(self) -> None:
        """For ever. It outlasts a bus that is away (bus/lease.py); should its renewal end all the same, it is taken again.
        Raises MachineHeldError once another host has it."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            _log.warning("the lease of machine %s was lost; taking it again", self._machine)
            while True:
                try:
                    self._lease = await self._taken()
                    break
                except BusError as error:  # no event says when a server that is back serves its streams again
                    _log.info("the lease of machine %s cannot be taken now: %s", self._machine, error)
                    await asyncio.sleep(_AGAIN_S)

    async def _taken(self) -> Lease:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self._lost.set)

        leases = Register(self._bus, self._publisher, "lease", LeaseRecord)
        patient = True
        while True:
            holder = (await leases.get(self._name)).value
            if holder is not None and holder.process != own() and (not patient or _lives_here(holder)):
                raise self._held(holder)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TTL_S + _MARGIN_S):
                    endpoint = self._bus.endpoint
                    return await acquire(endpoint, self._bus, self._publisher, self._name, self._owner, on_lost=tell)
            patient = False

    def _held(self, holder: LeaseRecord) -> MachineHeldError:
        if self._machine == HEAD:
            return MachineHeldError(
                f"run {self._bus.run} is led by {holder.owner}. A run has one head: start this host as one of its machines"
                f" (--machine), give this run another name (run.name), or end that one there (`actorctl down {self._bus.run}`)"
            )
        return MachineHeldError(
            f"machine {self._machine} of run {self._bus.run} is taken by {holder.owner}. Each name is one host's: give this"
            f" one another (--machine), or end that one (`actorctl down {self._bus.run} --machine {self._machine}`)"
        )


def _lives_here(holder: LeaseRecord) -> bool:
    """Of another host nobody knows before the lease has had its time."""
    process = holder.process
    return process is not None and process.space == own().space and not process.known_dead
