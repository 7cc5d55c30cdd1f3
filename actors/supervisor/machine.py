"""The supervisor of a machine that is not the head: its part of a run, from the head's opening to the run's end.

      lock -> config.yaml -> bus -> wait for the head -> same configuration? -> the machine's lease -> start model
        -> announce -> start or adopt actors -> watch
    finished, stopped or failed at the head, stopped here, an actor that cannot be kept running: drain; the others go on
    this process is killed: actors work on, and the next supervisor of this machine adopts them

The run, its account and its summary are the head's; nothing is written here but this machine's own folder.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from physarum.actors.address import towards
from physarum.actors.context import RunFolder
from physarum.actors.model_maker import Reporter
from physarum.actors.supervising import SUPERVISOR, supervisor_on
from physarum.actors.supervisor import run_folder
from physarum.actors.supervisor.announcing import announced, controlled
from physarum.actors.supervisor.assembly import Membership
from physarum.actors.supervisor.clocks import refuse_other_times
from physarum.actors.supervisor.launcher import CommandFor, actor_command
from physarum.actors.supervisor.leftovers import end_actors
from physarum.actors.supervisor.machine_lease import MachineLease
from physarum.actors.supervisor.model_fetch import fetch_start_model
from physarum.actors.supervisor.part import Part, Place
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_lock import RunLock
from physarum.actors.supervisor.stop import StopRequest
from physarum.actors.supervisor.verbs import supervisor_verbs
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.publisher import Publisher
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea

_log = logging.getLogger(__name__)


class MachineSupervisor:
    """Runs one machine's part of a configuration, which has a `bus.url` (a rule)."""

    def __init__(
        self,
        config: RootConfig,
        machine: str,
        stop: StopRequest,
        reporter: Reporter,
        *,
        command_for: CommandFor = actor_command,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        assert config.bus.url is not None
        self._config, self._machine, self._stop, self._reporter = config, machine, stop, reporter
        self._on_started = on_started
        self._endpoint = Endpoint.of(config.bus, config.bus.url)
        self.folder = RunFolder(config.run.folder_on(machine))
        self._command_for = command_for

    async def run(self) -> None:
        """Returns when the run is finished.

        Raises RunHeldError, RunDiffersError, HeadAbsentError, MachineRefusedError, MachineHeldError, StartModelError,
        ActorFailedError, HeadEndedError, InterruptedRunError, or an error of the bus or the configuration.
        """
        self._address = await asyncio.to_thread(towards, self._endpoint.url)
        with RunLock(self.folder.path):
            run_folder.refuse_unusable(self.folder, self._config)
            run_folder.prepare(self.folder, self._config, blobs=False)
            bus = await self._stop.guard(self._connected())
            try:
                await self._join(bus, await Publisher(bus).start())
            finally:
                await bus.close()
                await asyncio.to_thread(SharedArea.remove_of_run, self.folder.path)

    async def _connected(self) -> Bus:
        """Waits for the bus as it does for the head."""
        settings = self._config.supervisor
        name = self._config.run.name
        return await Bus.connect(self._endpoint, name, supervisor_on(self._machine), settings.join_timeout_s)

    async def _join(self, bus: Bus, publisher: Publisher) -> None:
        membership = Membership(self._config, self._machine, bus, publisher)
        self._say(f"machine {self._machine} waits for the head of run {self._config.run.name}")
        head = await self._stop.guard(membership.opened())
        if head.phase == "finished":
            self._say(f"run {self._config.run.name} is finished: nothing is started")
            await end_actors(self.folder, self._config.supervisor.drain_timeout_s)
            return
        await asyncio.to_thread(membership.refuse_unlike, head, self._address)
        await refuse_other_times(bus)
        lease = MachineLease(bus, publisher, self._machine)
        async with lease.held():
            run_folder.write_endpoint(self.folder, self._endpoint)
            if not await self._has_model(bus, membership):
                return
            self._say(f"machine {self._machine} joins run {self._config.run.name} of {head.host}")
            await self._work(bus, publisher, membership, lease)

    async def _has_model(self, bus: Bus, membership: Membership) -> bool:
        """False: the run was finished meanwhile. Actors that are adopted have it, wherever the head is now."""
        if any(record.alive for record in read_records(self.folder.actors)):
            return True
        fetching = fetch_start_model(self._config, self.folder, bus, self._reporter)
        return await self._stop.guard(membership.unless_over(fetching))

    async def _work(self, bus: Bus, publisher: Publisher, membership: Membership, lease: MachineLease) -> None:
        place = Place(
            config=self._config,
            folder=self.folder,
            stop=self._stop,
            machine=self._machine,
            address=self._address,
            command_for=self._command_for,
        )
        part = await Part.of(place, bus, publisher)
        period_s, me = self._config.supervisor.heartbeat_s, supervisor_on(self._machine)
        verbs = supervisor_verbs(self._config, self.folder, self._stop)
        async with (
            part.attendance.roster.open(),
            announced(bus, publisher, me, period_s, self._facts()),
            controlled(bus, me, verbs),
        ):
            await part.attendance.expect(SUPERVISOR, me)
            await part.work(membership.over, {"lease": lease.keep}, self._on_started, _said)

    def _facts(self) -> Mapping[str, Any]:
        return {"machine": self._machine, "address": self._address, "folder": str(self.folder.path)}

    def _say(self, text: str) -> None:
        _log.info("%s (%s)", text, socket.gethostname())
        self._reporter.say(text)


async def _said(fault: BaseException | None) -> None:
    """What ends this machine's part ends no other."""
    _log.info("the part of this machine ends: %s", fault or "the run is finished")
