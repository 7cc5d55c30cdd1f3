"""One machine's part of a run: its actors are started or adopted, kept, scaled, and drained at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from physarum.actors import scaling, states
from physarum.actors.context import RunFolder
from physarum.actors.supervising import supervisor_on
from physarum.actors.supervisor.attendance import Attendance
from physarum.actors.supervisor.crew import Crew
from physarum.actors.supervisor.errors import InterruptedRunError
from physarum.actors.supervisor.keeper import Keeper
from physarum.actors.supervisor.launcher import CommandFor, Launcher, actor_command
from physarum.actors.supervisor.log_bound import LogBound
from physarum.actors.supervisor.scaler import Scaler
from physarum.actors.supervisor.stop import StopRequest
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.machines import HEAD
from physarum.configs.root import RootConfig

Work = Callable[[], Coroutine[Any, Any, Any]]
Ending = Callable[[BaseException | None], Awaitable[None]]
"""Told, before the actors drain, what ended the work; None: the run is finished."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a part of the run is: the machine's name, its folder, the address at which others reach it (None: nobody does)."""

    config: RootConfig
    folder: RunFolder
    stop: StopRequest
    machine: str = HEAD
    address: str | None = None
    command_for: CommandFor = field(default=actor_command)


class Part:
    """Make it by `of`."""

    def __init__(self, place: Place, bus: Bus, publisher: Publisher, scaled: states.Scaled | None) -> None:
        self._place, config = place, place.config
        self._launcher = Launcher(config, place.folder, place.command_for, place.machine, place.address)
        self.attendance = Attendance(
            bus,
            publisher,
            config.supervisor,
            lambda instance: self.crew.kill_hung(instance),
            me=supervisor_on(place.machine),
            mine=lambda role, instance: scaling.is_on(config, role, instance, place.machine),
        )
        wanted = scaling.members(config, scaled, place.machine)
        # Who is no longer wanted, but works, is adopted too: it drains as soon as the scaler looks.
        left = [one for one in self._launcher.left_running() if one not in wanted]
        keepers = [self._keeper(role, instance) for role, instance in (*wanted, *left)]
        self.crew = Crew(place.folder, keepers, place.stop, config.supervisor.drain_timeout_s)
        register = Register(bus, publisher, "run", states.Scaled)
        self._scaler = Scaler(config, register, self.crew, self._keeper, place.machine)

    @classmethod
    async def of(cls, place: Place, bus: Bus, publisher: Publisher) -> Part:
        """With as many actors as were asked for last. Raises ConfigError when more devices are asked for than there are."""
        scaled = (await Register(bus, publisher, "run", states.Scaled).get(states.SCALE)).value
        return cls(place, bus, publisher, scaled)

    async def work(
        self,
        over: Work,
        beside: Mapping[str, Work],
        on_started: Callable[[], None],
        ending: Ending,
        before_services: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """From the start of the actors to the end of the last one. Returns when `over` has; raises what ended a keeper or one
        of `beside`, or InterruptedRunError. `before_services`: as Crew.drain has it."""
        tasks: list[asyncio.Task[Any]] = []
        fault: BaseException | None = None
        try:
            for keeper in self.crew.keepers:
                keeper.begin()
            tasks = self._kept() + [asyncio.create_task(one(), name=name) for name, one in beside.items()]
            on_started()
            finished = asyncio.create_task(over(), name="end of the run")
            asked = asyncio.create_task(self._place.stop.asked.wait(), name="stop request")
            tasks += [finished, asked]
            await _until(finished, asked, tasks)
        except BaseException as error:
            fault = error
            raise
        finally:
            await ending(fault)
            await self.crew.drain(before_services)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _kept(self) -> list[asyncio.Task[Any]]:
        settings = self._place.config.supervisor
        logs = LogBound(self._place.folder.logs, settings.log_bytes, settings.heartbeat_s)
        tasks = [
            asyncio.create_task(keeper.keep(), name=f"keeper of {keeper.instance}") for keeper in self.crew.keepers
        ]
        tasks.append(asyncio.create_task(self._scaler.keep(), name="scaler"))
        tasks.append(asyncio.create_task(logs.keep(), name="bound of the logs"))
        return tasks

    def _keeper(self, role: str, instance: str) -> Keeper:
        config = self._place.config
        alike = partial(scaling.alike, config, role)
        others_stand = partial(self._others_stand, role, instance, alike)
        return Keeper(role, instance, self._launcher, self.attendance, config.supervisor, others_stand)

    def _others_stand(self, role: str, instance: str, alike: Callable[[str, str], bool]) -> bool:
        return self.crew.others_stand(role, instance, alike)


async def _until(finished: asyncio.Task[Any], asked: asyncio.Task[Any], tasks: list[asyncio.Task[Any]]) -> None:
    """Returns when the run is finished; raises what ended a keeper, or InterruptedRunError."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if finished in done:
            return
        if asked in done:
            raise InterruptedRunError(
                "stopped before the run was finished; start the same configuration to continue it"
            )
