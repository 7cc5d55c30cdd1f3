"""How the machines of a run come together and end together: by one record of the head's in the RUN register.

    head      open (its configuration, address) ----------------------------------------> finished | stopped | failed
    machine   waits for "open" -> compares the configuration -> works -> hears that it is over -> drains

Invariant: a machine starts nothing before the head has opened the run, and nothing of another configuration. In which order
they are started does not matter; a machine that is lost or comes late changes nothing for the others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any, Final, NoReturn

from physarum.actors import states
from physarum.actors.address import VARIABLE, is_loopback
from physarum.actors.model_maker import sources_digest
from physarum.actors.orphanhood import word
from physarum.actors.supervising import INSTANCE, SUPERVISOR, until_alone
from physarum.actors.supervisor.errors import (
    HeadAbsentError,
    HeadEndedError,
    InterruptedRunError,
    MachineHeldError,
    MachineRefusedError,
    VersionError,
)
from physarum.actors.supervisor.run_folder import LAYOUT
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import EXPIRY_S, Heartbeat, Roster
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.machines import HEAD
from physarum.configs.placement import machine_of
from physarum.configs.portable import differences, hooks_in, portable, portable_name
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)

_NAMED: Final = 4
"""Differences in a message."""


def sources_of(config: RootConfig) -> dict[str, str]:
    """The digest of the Python files of each hook, by its portable name. Blocking. Raises StartModelError for a module that
    cannot be found."""
    return {portable_name(hook): sources_digest([hook]).hex() for hook in hooks_in(config)}


class Head:
    """The head's side. Of a run on one machine it tells nobody anything."""

    def __init__(self, config: RootConfig, bus: Bus, publisher: Publisher, address: str | None) -> None:
        self._config, self._address = config, address
        self._register = Register(bus, publisher, "run", states.Assembly)
        self._is_replaced = False

    async def open(self) -> None:
        """Machines may join from now on."""
        if self._config.machines:
            await self._tell("open", "")

    async def end(self, fault: BaseException | None) -> None:
        """Tells every machine that it is over, and why; None: the run is finished. Where another head leads the run by now it
        is not over."""
        self._is_replaced = isinstance(fault, MachineHeldError)
        if not self._config.machines or self._is_replaced:
            return
        stopped = isinstance(fault, (InterruptedRunError, asyncio.CancelledError))
        phase: states.Phase = "finished" if fault is None else "stopped" if stopped else "failed"
        try:
            await self._tell(phase, "" if fault is None else str(fault))
        except BusError as error:
            _log.warning("the run's machines were not told that it is over: %s", error)

    async def until_alone(self, roster: Roster, at_once: asyncio.Event) -> None:
        """Waits until the other machines have drained, as long as that may take: what they hold they hand back, for which they
        need the head's services."""
        if not self._config.machines or self._is_replaced:
            return
        limit_s = 2 * self._config.supervisor.drain_timeout_s + EXPIRY_S
        waits = [asyncio.create_task(self._left(roster)), asyncio.create_task(at_once.wait())]
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        if others := self._others(roster):
            names = ", ".join(sorted(beat.instance for beat in others))
            _log.warning("the run ends without these, which did not leave within %g s: %s", limit_s, names)

    async def _left(self, roster: Roster) -> None:
        while self._others(roster):
            await roster.wait_change(EXPIRY_S)

    def _others(self, roster: Roster) -> list[Heartbeat]:
        def is_other(beat: Heartbeat) -> bool:
            if beat.role == SUPERVISOR:
                return beat.instance != INSTANCE
            return machine_of(self._config, beat.role, beat.instance) != HEAD

        return [beat for beat in roster.members if is_other(beat)]

    async def _tell(self, phase: states.Phase, reason: str) -> None:
        record = states.Assembly(
            phase=phase,
            reason=reason[-2000:],
            layout=LAYOUT,
            configuration=portable(self._config),
            sources=await asyncio.to_thread(sources_of, self._config),
            host=socket.gethostname(),
            address=self._address or "",
            at=time.time(),
        )
        await self._register.put(record, states.ASSEMBLY)


class Membership:
    """A machine's side."""

    def __init__(self, config: RootConfig, machine: str, bus: Bus, publisher: Publisher) -> None:
        self._config, self._machine, self._bus = config, machine, bus
        self._register = Register(bus, publisher, "run", states.Assembly)

    async def opened(self) -> states.Assembly:
        """The head's record, once it has opened the run (or finished it). Raises HeadAbsentError after
        supervisor.join_timeout_s."""
        limit_s = self._config.supervisor.join_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await word(self._register, lambda found: found.phase in ("open", "finished"))
        except TimeoutError:
            raise HeadAbsentError(
                f"machine {self._machine}: the head of run {self._config.run.name} has not opened it within {limit_s:g} s"
                " (supervisor.join_timeout_s); start the same configuration without --machine on the head, or look there"
            ) from None

    def refuse_unlike(self, head: states.Assembly, address: str) -> None:
        """Raises MachineRefusedError or VersionError for what cannot be a part of the head's run. Blocking."""
        name = self._config.run.name
        if head.layout != LAYOUT:
            raise VersionError(
                f"the head of run {name} writes layout {head.layout!r}, this host {LAYOUT!r}; install one version of physarum"
                " on every machine"
            )
        if found := sorted(differences(head.configuration, portable(self._config))):
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            raise MachineRefusedError(
                f"machine {self._machine} has another configuration than the head of run {name} on {head.host}:"
                f" {', '.join(found[:_NAMED])}{more} differ. Start the same file with the same settings on every machine"
                " (paths may differ)"
            )
        ours = sources_of(self._config)
        if others := sorted(name for name, digest in head.sources.items() if ours.get(name) != digest):
            raise MachineRefusedError(
                f"machine {self._machine} has other sources of {', '.join(others[:_NAMED])} than the head of run {name} on"
                f" {head.host}; put the same files (of a package: the whole of it) on every machine"
            )
        for who, host, its in (("head", head.host, head.address), (self._machine, socket.gethostname(), address)):
            if is_loopback(its) and head.host != socket.gethostname():
                raise MachineRefusedError(
                    f"{who} ({host}) announces {its}, which other hosts do not reach: the bus is reached there by"
                    f" loopback. Set {VARIABLE} on {host} to an address of its own, and start it again"
                )

    async def over(self) -> None:
        """Returns when the run is finished. Raises InterruptedRunError (stopped), HeadEndedError (failed, or lost for
        run.orphan_timeout_s)."""
        limit_s = self._config.run.orphan_timeout_s
        async with Roster(self._bus, SUPERVISOR).open() as supervisors:
            told = asyncio.create_task(
                word(self._register, lambda found: found.phase != "open"), name="word of the head"
            )
            alone = asyncio.create_task(until_alone(supervisors, INSTANCE, limit_s), name="no head")
            try:
                await asyncio.wait((told, alone), return_when=asyncio.FIRST_COMPLETED)
                if not told.done():
                    self._lost()
                self._judge(told.result())
            finally:
                for task in (told, alone):
                    task.cancel()
                await asyncio.gather(told, alone, return_exceptions=True)

    async def unless_over(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether `work` came to its end before the run was finished; raises what either raises."""
        working, over = asyncio.create_task(work), asyncio.create_task(self.over())
        try:
            await asyncio.wait((working, over), return_when=asyncio.FIRST_COMPLETED)
            for task in (working, over):
                if task.done():
                    task.result()
            return working.done()
        finally:
            for task in (working, over):
                task.cancel()
            await asyncio.gather(working, over, return_exceptions=True)

    def _judge(self, last: states.Assembly) -> None:
        name = self._config.run.name
        if last.phase == "stopped":
            raise InterruptedRunError(f"the head stopped run {name}; start it again there and here to continue it")
        if last.phase == "failed":
            raise HeadEndedError(f"run {name} failed at its head on {last.host}: {last.reason}")

    def _lost(self) -> NoReturn:
        raise HeadEndedError(
            f"machine {self._machine}: no head of run {self._config.run.name} for {self._config.run.orphan_timeout_s:g} s"
            " (run.orphan_timeout_s). Start it again there, then here: the run goes on where it stands"
        )
