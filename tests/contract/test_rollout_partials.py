"""A rollout actor that drains hands its episodes over: the next one goes on with what was generated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from bus_fixture import DEADLINE_S
from test_fault_rollout import HOOKS, StubEngine, actor, beating, issue, until

from physarum.actors.wire import read_execution, read_task
from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.version import Span

pytestmark = pytest.mark.timeout(60)

TWICE = (f"rollout.generate={HOOKS}:ask_twice", "rollout.args={}", "supervisor.drain_timeout_s=0.2")


def hangs_in_the_first_second_turn(engine: StubEngine) -> asyncio.Event:
    """The event is set when somebody has asked for a second turn, which is then not answered; later ones are."""
    asked = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["input_ids"]) > 3 and not asked.is_set():
            asked.set()
            await asyncio.Event().wait()
        return await engine.says(request, body)

    engine.answer = answer
    return asked


@pytest.mark.parametrize("inline_limit_bytes", [256 << 10, 64], ids=["inline", "by reference"])
async def test_a_drained_episode_goes_on_with_the_tokens_it_had(
    tmp_path: Path, bus: Bus, publisher: Publisher, inline_limit_bytes: int
) -> None:
    engine = StubEngine()
    second_asked = hangs_in_the_first_second_turn(engine)
    limit = f"bus.inline_limit_bytes={inline_limit_bytes}"
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        first = actor(tmp_path, bus, publisher, *TWICE, limit)
        await issue(first, ["ask"])
        async with running(first), asyncio.timeout(DEADLINE_S):
            await second_asked.wait()
        (entry,) = await until(bus, "tasks", 1)
        assert entry.subject.startswith(f"ph.{bus.run}.tasks.partial.")
        partial = await read_task(first.context, entry.headers, entry.data)
        assert (partial.interruptions, [one.token_ids.tolist() for one in partial.begun]) == (1, [[7, 8]])
        engine.label = "policy@1.1"
        asked = engine.requests.total()
        async with running(actor(tmp_path, bus, publisher, *TWICE, limit)):
            (entry,) = await until(bus, "episodes", 1)
        assert engine.requests.total() == asked + 1, "the first turn is not generated again"
    execution = await read_execution(first.context, entry.headers, entry.data)
    (sample,) = execution.samples
    assert sample.token_ids.tolist() == [1, 2, 0, 7, 8, 9, 7, 8]
    assert sample.spans == [Span("policy@1.0", 0, 3), Span("policy@1.1", 3, 5)]
    assert execution.task.begun == []
    assert (await log.state(bus, "tasks")).messages == 0


async def test_generations_that_are_gone_are_made_again(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """The blob of a partial was lost with its disk: the task begins anew, it is not lost."""
    engine = StubEngine()
    second_asked = hangs_in_the_first_second_turn(engine)
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        first = actor(tmp_path, bus, publisher, *TWICE, "bus.inline_limit_bytes=64")
        await issue(first, ["ask"])
        async with running(first), asyncio.timeout(DEADLINE_S):
            await second_asked.wait()
        for blob in (first.context.folder.path / "blobs").rglob("*"):
            if blob.is_file():
                blob.unlink()
        async with running(actor(tmp_path, bus, publisher, *TWICE)):
            (entry,) = await until(bus, "episodes", 1)
    (sample,) = (await read_execution(first.context, entry.headers, entry.data)).samples
    assert sample.token_ids.tolist() == [1, 2, 0, 7, 8, 9, 7, 8]


async def test_an_episode_that_has_nothing_yet_is_given_back(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    engine, asked = StubEngine(), asyncio.Event()

    async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    engine.answer = never
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        made = actor(tmp_path, bus, publisher, *TWICE)
        await issue(made, ["ask"])
        async with running(made), asyncio.timeout(DEADLINE_S):
            await asked.wait()
        (entry,) = await until(bus, "tasks", 1)
    assert entry.subject.startswith(f"ph.{bus.run}.tasks.p1.")
