"""A trainer that asks whether training is held outlives a bus that does not answer just then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from physarum.actors import states
from physarum.actors.trainer import actor as module
from physarum.actors.trainer.actor import TrainerActor
from physarum.bus.errors import BusRefusedError, BusUnreachableError, ForeignRunError
from physarum.bus.register import Entry

pytestmark = pytest.mark.timeout(20)

Answer = Exception | states.Hold | None


class Holds:
    """A register that answers so, one after the other."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def watch(self, *key: str) -> AsyncIterator[asyncio.Event]:
        self.changed.set()
        yield self.changed

    async def get(self, *key: str) -> Entry[states.Hold]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None and not answer.released:
            asyncio.get_running_loop().call_soon(self.changed.set)
        return Entry(answer, 1)


class Trainer(TrainerActor):
    """As much of it as waits for the release."""

    def __init__(self, holds: Holds) -> None:
        self.became: list[str] = []
        register = cast(Any, lambda kind: holds)
        self.context = cast(Any, SimpleNamespace(draining=asyncio.Event(), run_register=register, policy=""))

    def become(self, state: str) -> None:
        self.became.append(state)


async def test_a_bus_that_does_not_answer_while_training_is_held_does_not_end_the_trainer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.01)
    caplog.set_level(logging.WARNING)
    held, released = states.Hold("withdrawn", 1.0), states.Hold("withdrawn", 1.0, released=True)
    trainer = Trainer(Holds(BusRefusedError("no responders"), held, BusUnreachableError("no answer"), released))
    await trainer._released()
    assert trainer.became == ["held", "ready"]
    assert caplog.text.count("nobody says whether training is held") == 2


async def test_a_drain_ends_the_wait_for_a_bus_that_does_not_answer() -> None:
    trainer = Trainer(Holds(BusUnreachableError("no answer")))
    asyncio.get_running_loop().call_soon(trainer.context.draining.set)
    await trainer._released()
    assert trainer.became == ["ready"]


async def test_another_runs_register_is_still_an_error() -> None:
    with pytest.raises(ForeignRunError):
        await Trainer(Holds(ForeignRunError("of run b")))._released()
