"""Waiting for what an evaluation needs: a version to evaluate, engines that serve it, the end of training."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.states import Head, TrainerDone
from physarum.actors.waiting import anything, until
from physarum.bus.errors import RecordError
from physarum.bus.presence import Heartbeat, Roster
from physarum.bus.register import Register
from physarum.bus.version import Version

_log = logging.getLogger(__name__)

_READY: Final = "ready"
_LOOK_S: Final = 60.0
"""Without any change of the roster, what is missing is logged this often."""


class Watch:
    """The heads of the run's own model and the trainer's end, as events."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._heads = Register(context.bus, context.publisher, "weights", Head)
        self._ends = context.run_register(TrainerDone)
        self._model = context.config.model.name
        evaluation = context.config.evaluation
        self._group = None if evaluation is None else evaluation.engines

    async def first_head(self) -> Head:
        return await until(self._heads, anything, states.HEAD, self._model)

    async def trainer_done(self) -> TrainerDone:
        return await until(self._ends, anything, states.TRAINER_DONE)

    async def head_from(self, number: int) -> Head:
        """The newest head whose number is at least `number`."""
        return await until(self._heads, lambda head: head.number >= number, states.HEAD, self._model)

    async def hold(self, label: str) -> None:
        """Where engines are kept for evaluations: they are to serve this version, and stay there."""
        if self._group is None:
            return
        version, newest = Version.parse(label), await self.first_head()
        head = Head(
            label=label,
            epoch=version.epoch,
            number=version.number,
            manifest="",
            total_bytes=0,
            published_at=time.time(),
            withdrawn=newest.withdrawn,
        )
        await self._heads.put(head, states.EVAL_HEAD, self._model, deadline_s=None)

    async def engines_at(self, label: str) -> None:
        """Until at least one engine is ready and every ready one serves `label` or something newer."""
        wanted = Version.parse(label)
        async with Roster(self._context.bus, "engine").open() as roster:
            while not serving(self._answering(roster.members), wanted):
                if not await roster.wait_change(_LOOK_S):
                    _log.info("waiting for engines at %s; there are: %s", label, _described(roster.members))

    def _answering(self, engines: list[Heartbeat]) -> list[Heartbeat]:
        """Those that answer evaluations."""
        if self._group is None:
            return engines
        return [engine for engine in engines if engine.facts.get("group") == self._group]


def serving(engines: list[Heartbeat], wanted: Version) -> bool:
    """Whether every ready engine serves at least `wanted`, and there is one."""
    ready = [engine for engine in engines if engine.state == _READY and _follows(engine, wanted.model)]
    return bool(ready) and all(_version(engine) >= wanted for engine in ready)


def _follows(engine: Heartbeat, model: str) -> bool:
    """Engines of another model (a judge) have versions of another name, or none."""
    version = engine.facts.get("version")
    return isinstance(version, str) and version.partition("@")[0] == model


def _version(engine: Heartbeat) -> Version:
    """The served version; one that has none yet is older than all."""
    try:
        return Version.parse(str(engine.facts["version"]))
    except RecordError:
        return Version("", -1, -1)


def _described(engines: list[Heartbeat]) -> str:
    return ", ".join(f"{one.instance} {one.state} {one.facts.get('version')}" for one in engines) or "none"


async def within(seconds: float, work: asyncio.Future[None]) -> bool:
    """Whether `work` finished in time; it is cancelled when it did not."""
    done, _ = await asyncio.wait({work}, timeout=seconds)
    if not done:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return False
    work.result()
    return True
