"""The node actor: one node's part of an engine, for as long as the engine's attempt lasts (actors/engine/nodes.py).

    waiting --the engine announces an attempt--> starting --> serving --the attempt is over--> its part is ended --> waiting
                                                     `-----------`--its part ends: this actor ends, and with it the attempt

It takes no requests and no versions of its own: ranks load what node 0 is told to load, from a folder that every node sees.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import aiohttp
import msgspec

from physarum.actors.engine.encoding import ENCODER
from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.errors import EngineArgumentError, EngineDiedError, EngineStartTimeoutError
from physarum.actors.engine.handing_over import HAND_OVER_S
from physarum.actors.engine.nodes import (
    ATTEMPT_FACT,
    ENGINE_FACT,
    RENDEZVOUS_FACT,
    Rendezvous,
    engine_of,
    node_arguments,
)
from physarum.actors.engine.opening import opening
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.policy_engines import recording
from physarum.actors.runtime import Actor
from physarum.actors.served_model import served_model
from physarum.agents.connections import open_session
from physarum.bus.presence import Roster
from physarum.configs.engine import EngineConfig

_OUTLIVES_S: Final = 2 * HAND_OVER_S
"""Its engine's hand-over, and the end of its process; one that does not leave then goes on without this node, and ends."""


class NodeActor(Actor):
    """Role node, instance `<group>-<number>-node-<rank>`. Announces facts engine, attempt (while it takes part)."""

    role: ClassVar[str] = "node"

    async def run(self) -> None:
        self._engine, self._rank = engine_of(self.context.identity.instance)
        group, _, number = self._engine.rpartition("-")
        self._group = group
        self._settings: EngineConfig = self.config.engines[group].of_server(int(number))
        self._part = self._settings.part_of(int(number))
        changed = asyncio.Event()
        self._changed = changed
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            self._engines = await stack.enter_async_context(Roster(self.bus, "engine", on_change=changed.set).open())
            draining = asyncio.create_task(self.context.draining.wait(), name="draining")
            working = asyncio.create_task(self._work(session), name="attempts")
            stack.push_async_callback(_ended, (draining, working))
            await asyncio.wait((draining, working), return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                working.result()
            elif attempt := self.facts.get(ATTEMPT_FACT):
                await self._outlive(attempt, working)

    async def _outlive(self, attempt: str, working: asyncio.Task[None]) -> None:
        """An engine that leaves with its nodes hands over what it has, for which it needs them: its word is waited for."""
        over = asyncio.create_task(self._until_over(attempt), name="the engine leaves")
        try:
            await asyncio.wait((over, working), timeout=_OUTLIVES_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended((over,))

    async def _work(self, session: aiohttp.ClientSession) -> None:
        """One attempt after another, for ever."""
        last = ""
        while True:
            self.facts = {"group": self._group, ENGINE_FACT: self._engine, ATTEMPT_FACT: ""}
            self.become("waiting for its engine")
            attempt = await self._next(last)
            last = attempt.attempt
            self.facts = {**self.facts, ATTEMPT_FACT: last}
            self.become("starting")
            process = await self._started(attempt)
            try:
                await self._take_part(process, last, session)
            finally:
                await process.stop()

    async def _take_part(self, process: EngineProcess, attempt: str, session: aiohttp.ClientSession) -> None:
        """Returns when the attempt is over. Raises ActorError when this part ends before."""
        healthy = asyncio.create_task(process.wait_healthy(session, self._settings.start_timeout_s))
        over = asyncio.create_task(self._until_over(attempt))
        died = asyncio.create_task(process.wait_exit())
        try:
            await asyncio.wait((healthy, over), return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                healthy.result()
                self.become("ready")
                await asyncio.wait((over, died), return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                raise process.death()
        except (EngineDiedError, EngineStartTimeoutError) as error:
            raise ActorError(f"node {self._rank} of {self._engine}: {error}") from error
        finally:
            await _ended((healthy, over, died))

    async def _next(self, last: str) -> Rendezvous:
        """The engine's attempt, once it is another one than `last`."""
        while True:
            self._changed.clear()
            found = self._announced()
            if found is not None and found.attempt != last:
                return found
            await self._changed.wait()

    async def _until_over(self, attempt: str) -> None:
        while True:
            self._changed.clear()
            found = self._announced()
            if found is None or found.attempt != attempt:
                return
            await self._changed.wait()

    def _announced(self) -> Rendezvous | None:
        facts = (beat.facts for beat in self._engines.members if beat.instance == self._engine)
        found = next((one.get(RENDEZVOUS_FACT) for one in facts), None)
        return None if found is None else msgspec.convert(found, Rendezvous)

    async def _started(self, attempt: Rendezvous) -> EngineProcess:
        folder = self.context.folder
        spec = self._spec(attempt)
        try:
            return await EngineProcess.start(spec, cache=folder.path.parent / ".cache")
        except EngineArgumentError as error:
            raise UnrecoverableError(f"engines.{self._group}.sglang: {error}") from error

    def _spec(self, attempt: Rendezvous) -> EngineSpec:
        """As the engine's own, but for its place."""
        folder = self.context.folder
        return EngineSpec(
            python=engine_python(self._settings),
            model=self._settings.model or served_model(folder, self.config).resolve(),
            label="start",
            log_file=folder.logs / f"{self.context.identity.instance}.sglang.log",
            sglang={**recording(self.config, self._group), **self._settings.sglang},
            environment=self._settings.env,
            role=self._part.role,
            language_only=self._settings.encodes and self._part.role != ENCODER,
            nodes=node_arguments(self._part.nodes, self._rank, attempt.address),
            opening=opening(self.context),
        )


async def _ended(tasks: tuple[asyncio.Task[Any], ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
