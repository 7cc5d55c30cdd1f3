"""How the machines of a run come together and end together: by one record of the head's in the RUN register.

    head      open (its configuration, address) ----------------------------------------> finished | stopped | failed
    machine   waits for "open" -> compares the configuration -> works -> hears that it is over -> drains

Invariant: a machine starts nothing before the head has opened the run, and nothing of another configuration. In which order
they are started does not matter; a machine that is lost or comes late changes nothing for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from physarum.actors import states
from physarum.actors.address import VARIABLE, is_loopback
from physarum.actors.supervising import INSTANCE, SUPERVISOR, until_alone
from physarum.actors.supervisor.errors import (
    HeadAbsentError,
    HeadEndedError,
    InterruptedRunError,
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
from physarum.configs.portable import differences, portable
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)

_REREAD_S: Final = 30.0
_NAMED: Final = 4
"""Differences in a message."""


class Head:
    """The head's side. Of a run on one machine it tells nobody anything."""

    def __init__(self, config: RootConfig, bus: Bus, publisher: Publisher, address: str | None) -> None:
        self._config, self._address = config, address
        self._register = Register(bus, publisher, "run", states.Assembly)

    async def open(self) -> None:
        """Machines may join from now on."""
        if self._config.machines:
            await self._tell("open", "")

    async def end(self, fault: BaseException | None) -> None:
        """Tells every machine that it is over, and why; None: the run is finished."""
        if not self._config.machines:
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
        if not self._config.machines:
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
                return await self._until(lambda found: found.phase in ("open", "finished"))
        except TimeoutError:
            raise HeadAbsentError(
                f"machine {self._machine}: the head of run {self._config.run.name} has not opened it within {limit_s:g} s"
                " (supervisor.join_timeout_s); start the same configuration without --machine on the head, or look there"
            ) from None

    def refuse_unlike(self, head: states.Assembly, address: str) -> None:
        """Raises MachineRefusedError or VersionError for what cannot be a part of the head's run."""
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
            word = asyncio.create_task(self._until(lambda found: found.phase != "open"), name="word of the head")
            alone = asyncio.create_task(until_alone(supervisors, INSTANCE, limit_s), name="no head")
            try:
                await asyncio.wait((word, alone), return_when=asyncio.FIRST_COMPLETED)
                if not word.done():
                    self._lost()
                self._judge(word.result())
            finally:
                for task in (word, alone):
                    task.cancel()
                await asyncio.gather(word, alone, return_exceptions=True)

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

    async def _until(self, satisfied: Callable[[states.Assembly], bool]) -> states.Assembly:
        async with self._register.watch(states.ASSEMBLY) as changed:
            while True:
                changed.clear()
                try:
                    found = (await self._register.get(states.ASSEMBLY)).value
                except BusError as error:  # the head makes the streams
                    _log.info("the head's word cannot be read now: %s", error)
                    found = None
                if found is not None and satisfied(found):
                    return found
                # The hint comes with the write or with a reconnection; reading again now and then costs nothing.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REREAD_S):
                        await changed.wait()
