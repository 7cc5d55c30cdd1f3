"""Keeps a crew as large as it was asked to be: starts who is missing, and lets who is too many drain and leave.

The first member that cannot be kept running ends it with that member's error, as a keeper would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from physarum.actors import scaling, states
from physarum.actors.supervisor.crew import Crew
from physarum.actors.supervisor.keeper import Keeper
from physarum.bus.errors import BusError
from physarum.bus.register import Register
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0

MakeKeeper = Callable[[str, str], Keeper]


class Scaler:
    """Of one supervisor. `make_keeper` is called with (role, instance); `machine`: whose actors it keeps (None: all)."""

    def __init__(
        self,
        config: RootConfig,
        register: Register[states.Scaled],
        crew: Crew,
        make_keeper: MakeKeeper,
        machine: str | None = None,
    ) -> None:
        self._config, self._register, self._crew, self._make_keeper = config, register, crew, make_keeper
        self._machine = machine
        self._tasks: set[asyncio.Task[Any]] = set()

    async def keep(self) -> None:
        """Never returns. Raises ActorFailedError."""
        try:
            async with self._register.watch(states.SCALE) as changed:
                while True:
                    await self._until(changed)
                    changed.clear()
                    try:
                        asked = (await self._register.get(states.SCALE)).value
                    except BusError as error:  # no event says when a server that is back serves its streams again
                        _log.warning("how many actors are wanted cannot be read now, trying again: %s", error)
                        asyncio.get_running_loop().call_later(_AGAIN_S, changed.set)
                        continue
                    self._apply(asked)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _until(self, changed: asyncio.Event) -> None:
        """Something was asked for, or a member has left or ended: whose name is asked for again may join then."""
        hint = asyncio.create_task(changed.wait())
        try:
            done, _ = await asyncio.wait({hint, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hint.cancel()
        self._tasks -= done
        for task in done:
            task.result()

    def _apply(self, scaled: states.Scaled | None) -> None:
        wanted = scaling.members(self._config, scaled, self._machine)
        names = {instance for _, instance in wanted}
        for keeper in [one for one in self._crew.keepers if one.instance not in names and not one.finishing.is_set()]:
            _log.info("%s is no longer wanted: it drains", keeper.instance)
            self._begin(self._crew.leave(keeper), f"leaving of {keeper.instance}")
        there = {keeper.instance for keeper in self._crew.keepers}
        for role, instance in wanted:
            if instance not in there:
                keeper = self._make_keeper(role, instance)
                self._crew.join(keeper)
                keeper.begin()
                self._begin(keeper.keep(), f"keeper of {instance}")

    def _begin(self, work: Any, name: str) -> None:
        self._tasks.add(asyncio.create_task(work, name=name))
