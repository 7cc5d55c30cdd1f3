"""The engine actor: one SGLang server, started or attached, which follows the head (following.py) and reports its load.

start server, or attach -> healthy -> waiting for weights -> ready <--> unreachable: it does not answer
     |  dies: its last log lines end this actor                              `--> for minutes: it is started anew
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import aiohttp

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.errors import (
    EngineArgumentError,
    EngineDiedError,
    EngineError,
    EngineStartTimeoutError,
)
from physarum.actors.engine.external import ExternalEngine
from physarum.actors.engine.following import Following
from physarum.actors.engine.frozen import check_frozen
from physarum.actors.engine.handing_over import hand_over
from physarum.actors.engine.load import UNREACHABLE, LoadReport, limit_of_peers
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.policy_engines import policy_group
from physarum.actors.runtime import Actor
from physarum.actors.served_model import served_model
from physarum.configs.engine import EngineConfig
from physarum.configs.sampling import parameters

_log = logging.getLogger(__name__)


class EngineActor(Actor):
    """Role engine, instance `<group>-<number>`. Announces facts group, url, version (label), engine_pid, load."""

    role: ClassVar[str] = "engine"

    async def run(self) -> None:
        self._group = self.context.identity.instance.rsplit("-", 1)[0]
        self._settings: EngineConfig = self.config.engines[self._group]
        self.facts = {"group": self._group}
        self._following: Following | None = None
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            process = await self._start(stack, session)
            control = EngineControl(process.url, session, update_timeout_s=self._settings.update_timeout_s)
            can, found = await control.capabilities(), await limit_of_peers(self.bus, self._group)
            report = LoadReport(self, self._settings, control, can, found)
            await report.sample()  # its limit is known before it takes traffic
            self.facts |= {"url": process.url, "engine_pid": process.pid}
            died = asyncio.ensure_future(process.wait_exit())
            serving = asyncio.create_task(self._serve(session, control), name="serve heads")
            reporting = asyncio.create_task(self._report_load(report), name="report load")
            draining = asyncio.create_task(self.context.draining.wait(), name="draining")
            stack.callback(died.cancel)
            stack.push_async_callback(_ended, serving)
            stack.push_async_callback(_ended, reporting)
            stack.callback(draining.cancel)
            await asyncio.wait({died, serving, draining, reporting}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await self._detach(control)
                return
            if died.done():
                raise process.death()
            for ended in (serving, reporting):
                if ended.done():
                    ended.result()

    async def _start(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> EngineProcess | ExternalEngine:
        started = time.perf_counter()
        process = await self._server()
        stack.push_async_callback(process.stop)
        healthy = asyncio.create_task(process.wait_healthy(session, self._settings.start_timeout_s))
        draining = asyncio.create_task(self.context.draining.wait())
        stack.callback(draining.cancel)
        await asyncio.wait({healthy, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not healthy.done():
            healthy.cancel()
            raise ActorError("asked to stop while the engine was starting")
        try:
            healthy.result()
        except (EngineDiedError, EngineStartTimeoutError) as error:
            raise ActorError(f"the engine did not start: {error}") from error
        seconds = time.perf_counter() - started
        self.numbers["start_s"] = round(seconds, 1)
        await self.context.emit("engine_start", {"seconds": seconds})
        return process

    async def _server(self) -> EngineProcess | ExternalEngine:
        """Started here, or somebody else's."""
        if self._settings.url is not None:
            return ExternalEngine(str(self._settings.url[self.context.identity.index]))
        spec = EngineSpec(
            python=engine_python(self._settings),
            model=self._settings.model or served_model(self.context.folder, self.config).resolve(),
            label="start",
            log_file=self.context.folder.logs / f"{self.context.identity.instance}.sglang.log",
            sglang={**self._recording(), **self._settings.sglang},
            sampling=() if self._settings.model is not None else parameters(self.config.rollout.sampling),
            environment=self._settings.env,
        )
        try:
            return await EngineProcess.start(spec, cache=self.context.folder.path.parent / ".cache")
        except EngineArgumentError as error:
            raise UnrecoverableError(f"engines.{self._group}.sglang: {error}") from error

    def _recording(self) -> dict[str, Any]:
        """What the trainer replays is reported by engines that are started for it."""
        replays = self.config.trainer.algorithm.replay.routing == "R3" and self._group == policy_group(self.config)
        return {"enable-return-routed-experts": True} if replays else {}

    async def _detach(self, control: EngineControl) -> None:
        """Somebody else's engine goes on: it is not left in the middle of an update. Ours ends: it gives back what it has."""
        if self._settings.url is None:
            await hand_over(control)
        elif self._following is not None:
            await self._following.settled(3 * self._settings.update_timeout_s)

    async def _serve(self, session: aiohttp.ClientSession, control: EngineControl) -> None:
        if self._settings.model is not None:
            if self._settings.url is None:
                self.facts["model"] = await check_frozen(self.context, self._group, self._settings.model)
            self.facts["version"] = "frozen"
            self.become("ready")
            await self.context.draining.wait()
            return
        self._following = Following(self, self._settings, self._group, session, control)
        await self._following.run()

    async def _report_load(self, report: LoadReport) -> None:
        """The server's own load, sampled and announced: it has no event for it."""
        while True:
            await report.sample()
            await asyncio.sleep(self._load_period_s)

    @property
    def _load_period_s(self) -> float:
        concurrency = self._settings.concurrency
        return self.config.supervisor.heartbeat_s if concurrency is None else concurrency.period_s

    async def answered(self, whole: bool) -> None:
        """The server answers; `whole`: it may be another one, or have been silent, so it is looked at. Raises EngineError."""
        if not whole:
            return
        if self._following is not None:
            await self._following.check()
        elif self.state == UNREACHABLE:
            self.become("ready")

    def silent(self, error: EngineError) -> None:
        """The server does not answer: no traffic goes there until it does."""
        if self.state == "ready":
            _log.warning("the engine does not answer: %s", error)
            self.become(UNREACHABLE)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
