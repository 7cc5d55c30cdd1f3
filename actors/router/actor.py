"""The router actor: one sglang-router for one group, told of the group's engines as they come and go.

presence of the engines --> Workers --> sglang-router <-- requests of the rollout actors, which find it by presence
                                            |  dies: its last log lines end this actor; meanwhile engines are asked directly
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import ClassVar, Final

import aiohttp

from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.errors import (
    EngineArgumentError,
    EngineDiedError,
    EngineInspectionError,
    EngineStartTimeoutError,
)
from physarum.actors.engine.process import ServerProcess
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.policy_engines import READY
from physarum.actors.router.process import start_router
from physarum.actors.router.workers import Workers
from physarum.actors.runtime import Actor
from physarum.actors.waiting import unless_draining
from physarum.agents.connections import open_session
from physarum.bus.presence import Roster

_RETRY_S: Final = 2.0


def group_of(instance: str) -> str:
    """`router-policy-0` is in front of `policy`."""
    return instance.removeprefix("router-").rpartition("-")[0]


class RouterActor(Actor):
    """Role router, instance `router-<group>-0`. Announces facts group and url."""

    role: ClassVar[str] = "router"

    async def run(self) -> None:
        group = group_of(self.context.identity.instance)
        changed = asyncio.Event()
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            engines = await stack.enter_async_context(Roster(self.bus, "engine", on_change=changed.set).open())
            process = await self._started(group, stack, session)
            self.facts = {"group": group, "url": process.url, "router_pid": process.pid}
            died = asyncio.create_task(process.wait_exit(), name="router ends")
            draining = asyncio.create_task(self.context.draining.wait(), name="draining")
            keeping = asyncio.create_task(self._keep(Workers(process.url, session), group, engines, changed))
            tasks = (died, draining, keeping)
            stack.push_async_callback(_ended, tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                return
            if died.done():
                raise ActorError(str(process.death()))
            keeping.result()

    async def _started(self, group: str, stack: AsyncExitStack, session: aiohttp.ClientSession) -> ServerProcess:
        settings, folder = self.config.engines[group], self.context.folder
        log_file = folder.logs / f"{self.context.identity.instance}.sglang.log"
        try:
            process = await start_router(
                engine_python(settings),
                settings.start_router or {},
                settings.env,
                log_file,
                folder.path.parent / ".cache",
            )
        except (EngineArgumentError, EngineInspectionError) as error:
            remedy = "or remove the key: rollout actors then choose engines themselves"
            raise UnrecoverableError(f"engines.{group}.start_router: {error}; {remedy}") from error
        stack.push_async_callback(process.stop)
        try:
            await unless_draining(self.context, process.wait_healthy(session, settings.start_timeout_s))
        except (EngineDiedError, EngineStartTimeoutError) as error:
            raise ActorError(f"the router did not start: {error}") from error
        return process

    async def _keep(self, workers: Workers, group: str, engines: Roster, changed: asyncio.Event) -> None:
        """For ever. It is ready once it was told of an engine."""
        while True:
            changed.clear()
            beats = [beat for beat in engines.members if beat.facts.get("group") == group and beat.state == READY]
            whole = await workers.become({str(beat.facts["url"]) for beat in beats if "url" in beat.facts})
            self.numbers["engines"] = len(workers.urls)
            state = READY if workers.urls else "waiting for engines"
            if state != self.state:
                self.become(state)
            try:
                async with asyncio.timeout(None if whole else _RETRY_S):
                    await changed.wait()
            except TimeoutError:
                continue


async def _ended(tasks: tuple[asyncio.Task[object], ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
