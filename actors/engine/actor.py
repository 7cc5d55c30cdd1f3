"""The engine actor: one SGLang server, started or attached, which follows the head (following.py) and reports its load.

start server, or attach -> healthy -> waiting for weights -> ready <--> unreachable: it does not answer
     |  dies: its last log lines end this actor                              `--> for minutes: it is started anew
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ClassVar

import aiohttp
import msgspec

from physarum.actors.engine.attached import check_attached
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.encoding import ENCODER, Encoders
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
from physarum.actors.engine.nodes import RENDEZVOUS_FACT, Nodes, node_arguments
from physarum.actors.engine.nodes import ROLE as NODE
from physarum.actors.engine.opening import opening
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.policy_engines import recording
from physarum.actors.runtime import Actor
from physarum.actors.served_model import served_model
from physarum.actors.waiting import unless_draining
from physarum.agents.connections import open_session
from physarum.bus.presence import Roster
from physarum.configs.engine import EngineConfig
from physarum.configs.sampling import parameters

_log = logging.getLogger(__name__)


class EngineActor(Actor):
    """Role engine, instance `<group>-<number>`. Announces facts group, url, version (label), engine_pid, load, and where it is
    not a regular one role, bootstrap_port."""

    role: ClassVar[str] = "engine"

    async def run(self) -> None:
        self._group = self.context.identity.instance.rsplit("-", 1)[0]
        self._settings: EngineConfig = self.config.engines[self._group].of_server(self.context.identity.index)
        self._role = self._settings.part_of(self.context.identity.index).role
        self.facts = {"group": self._group, **({"role": self._role} if self._role != "regular" else {})}
        self._following: Following | None = None
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            process = await self._start(stack, session)
            if self._role == ENCODER:
                await self._encode(process)
                return
            limit_s = self._settings.update_timeout_s
            control = EngineControl(process.url, session, update_timeout_s=limit_s, key=process.key)
            can, found = await control.capabilities(), await limit_of_peers(self.bus, self._group)
            report = LoadReport(self, self._settings, control, can, found)
            await report.sample()  # its limit is known before it takes traffic
            self.facts |= {"url": process.announced, "engine_pid": process.pid}
            if process.bootstrap_port is not None:
                self.facts["bootstrap_port"] = process.bootstrap_port
            died = asyncio.ensure_future(process.wait_exit())
            serving = asyncio.create_task(self._serve(session, control), name="serve heads")
            reporting = asyncio.create_task(self._report_load(report), name="report load")
            draining = asyncio.create_task(self.context.draining.wait(), name="draining")
            stack.callback(died.cancel)
            stack.push_async_callback(_ended, serving)
            stack.push_async_callback(_ended, reporting)
            stack.callback(draining.cancel)
            ends = {died, serving, draining, reporting, self._lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await self._detach(control)
                return
            if died.done():
                raise process.death()
            for ended in (serving, reporting, self._lost):
                if ended.done():
                    ended.result()

    async def _start(self, stack: AsyncExitStack, session: aiohttp.ClientSession) -> EngineProcess | ExternalEngine:
        started = time.perf_counter()
        self._nodes = await self._other_nodes(stack)
        process = await self._server()
        stack.push_async_callback(process.stop)
        settings = self._settings
        healthy = asyncio.create_task(
            process.wait_healthy(
                session, settings.start_timeout_s, empty=settings.starts_empty and settings.model is None
            )
        )
        draining = asyncio.create_task(self.context.draining.wait())
        self._lost = asyncio.create_task(self._node_lost(), name="nodes")
        stack.callback(draining.cancel)
        stack.callback(self._lost.cancel)
        await asyncio.wait({healthy, draining, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if not healthy.done():
            healthy.cancel()
            if self._lost.done():
                self._lost.result()
            raise ActorError("asked to stop while the engine was starting")
        try:
            healthy.result()
        except (EngineDiedError, EngineStartTimeoutError) as error:
            raise ActorError(f"the engine did not start: {error}") from error
        seconds = time.perf_counter() - started
        self.numbers["start_s"] = round(seconds, 1)
        await self.context.emit("engine_start", {"seconds": seconds})
        return process

    async def _other_nodes(self, stack: AsyncExitStack) -> Nodes | None:
        """Once they are all there: this engine's part may be started."""
        count = self._settings.part_of(self.context.identity.index).nodes
        if count == 1 or self._settings.url is not None:
            return None
        changed = asyncio.Event()
        roster = await stack.enter_async_context(Roster(self.bus, NODE, on_change=changed.set).open())
        context = self.context
        nodes = Nodes(roster, changed, context.identity.instance, count, context.host, context.address)
        self.become("waiting for its nodes")
        meeting = await unless_draining(self.context, nodes.meet(self._settings.start_timeout_s))
        if meeting is None:
            raise ActorError("asked to stop while the engine waited for its nodes")
        self._meeting = meeting
        self.facts[RENDEZVOUS_FACT] = msgspec.to_builtins(meeting)
        self.become("starting")
        stack.callback(nodes.close)
        return nodes

    async def _node_lost(self) -> None:
        """Raises ActorError when a node has left the attempt; all of them are then started anew."""
        if self._nodes is None:
            await asyncio.Event().wait()
            return
        name = await self._nodes.lost()
        raise ActorError(f"{name} has left the engine: an engine is all of its nodes, and all are started anew")

    async def _server(self) -> EngineProcess | ExternalEngine:
        """Started here, or somebody else's."""
        if self._settings.url is not None:
            return ExternalEngine(str(self._settings.url[self.context.identity.index]))
        spec = EngineSpec(
            python=engine_python(self._settings),
            model=self._settings.model or served_model(self.context.folder, self.config).resolve(),
            label="start",
            log_file=self.context.folder.logs / f"{self.context.identity.instance}.sglang.log",
            sglang={**recording(self.config, self._group), **self._settings.sglang},
            sampling=() if self._settings.model is not None else parameters(self.config.rollout.sampling),
            environment=self._settings.env,
            role=self._role,
            language_only=self._settings.encodes and self._role != ENCODER,
            nodes={} if self._nodes is None else node_arguments(self._nodes.count, 0, self._meeting.address),
            opening=opening(self.context),
        )
        try:
            return await EngineProcess.start(spec, cache=self.context.folder.path.parent / ".cache")
        except EngineArgumentError as error:
            raise UnrecoverableError(f"engines.{self._group}.sglang: {error}") from error

    async def _detach(self, control: EngineControl) -> None:
        """Somebody else's engine goes on: it is not left in the middle of an update. Ours ends: it gives back what it has."""
        if self._settings.url is None:
            await hand_over(control)
        elif self._following is not None:
            await self._following.settled(3 * self._settings.update_timeout_s)

    async def _encode(self, process: EngineProcess | ExternalEngine) -> None:
        """An encoder takes neither versions nor requests of ours: it is there, or it is not."""
        self.facts |= {"url": process.announced, "engine_pid": process.pid}
        if self._settings.model is not None:
            self.facts["model"] = await check_frozen(self.context, self._group, self._settings.model)
        self.become("ready")
        died = asyncio.create_task(process.wait_exit(), name="the server's end")
        try:
            await unless_draining(self.context, asyncio.wait({died, self._lost}, return_when=asyncio.FIRST_COMPLETED))
        finally:
            died.cancel()
        if self._lost.done():
            self._lost.result()
        if died.done() and not died.cancelled():
            raise process.death()

    @asynccontextmanager
    async def _told_of_encoders(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Its server is told of encoders while the block runs, which begins when it knows one."""
        if not self._settings.encodes:
            yield
            return
        changed = asyncio.Event()
        encoders = Encoders(f"http://127.0.0.1:{self.facts['bootstrap_port']}", self._group, session)
        async with Roster(self.bus, "engine", on_change=changed.set).open() as roster:
            following = asyncio.create_task(encoders.follow(roster, changed), name="encoders")
            try:
                self.become("waiting for encoders")
                await self._until_encoded(encoders)
                yield
            finally:
                await _ended(following)

    async def _until_encoded(self, encoders: Encoders) -> None:
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await encoders.any.wait()
        except TimeoutError as error:
            raise ActorError(
                f"no encoder of group {self._group} was ready within engines.<group>.start_timeout_s = {limit_s:g} s; see"
                " the logs of its encoders (actorctl ps)"
            ) from error

    async def _serve(self, session: aiohttp.ClientSession, control: EngineControl) -> None:
        if self._settings.model is not None:
            if self._settings.url is None:
                self.facts["model"] = await check_frozen(self.context, self._group, self._settings.model)
            else:
                model, group = self._settings.model, self._group
                self.facts["model"] = await check_attached(self.context, group, model, control)
            self.facts["version"] = "frozen"
            async with self._told_of_encoders(session):
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
