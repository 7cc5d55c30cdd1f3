"""A rollout actor that drains hands its episodes over: the next one goes on with what was generated."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from bus_fixture import DEADLINE_S
from test_fault_rollout import HOOKS, StubEngine, actor, beating, issue, ordinals, until

from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.wire import read_execution, read_task
from physarum.bus import log
from physarum.bus.blobs import BlobRef, BlobStore
from physarum.bus.connection import Bus
from physarum.bus.errors import BlobRefusedError, BlobUnreachableError
from physarum.bus.publisher import Publisher
from physarum.bus.version import Span

pytestmark = pytest.mark.timeout(60)

TWICE = (f"rollout.generate={HOOKS}:ask_twice", "rollout.args={}", "supervisor.drain_timeout_s=0.2")


def hangs_in_the_first_second_turn(engine: StubEngine, until: asyncio.Event | None = None) -> asyncio.Event:
    """The event is set when somebody has asked for a second turn, which is answered after `until`; later ones at once."""
    asked, released = asyncio.Event(), until or asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(body["input_ids"]) > 3 and not asked.is_set():
            asked.set()
            await released.wait()
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


async def test_an_actor_that_drains_leases_no_further_task(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """Its open requests used to take the next tasks, which then lay with it until its own episodes were done."""
    engine = StubEngine()
    released = asyncio.Event()
    second_asked = hangs_in_the_first_second_turn(engine, released)
    slow = ("rollout.slots=2", "bus.fetch_timeout_s=60.0", f"supervisor.drain_timeout_s={4 * DEADLINE_S}")
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        first = actor(tmp_path, bus, publisher, *TWICE, *slow)
        await issue(first, ["ask"])
        async with running(first) as work, asyncio.timeout(DEADLINE_S):
            await second_asked.wait()
            first.context.drain()
            await issue(first, ["ask"], start=1)
            async with running(actor(tmp_path, bus, publisher, *TWICE)):
                assert await ordinals(bus, 1) == Counter([1])
            assert not work.done()
            released.set()


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


async def drained_with_generations(place: Path, bus: Bus, publisher: Publisher, engine: StubEngine) -> RolloutActor:
    """An actor that was drained in its second turn; what it had is in a blob."""
    asked = hangs_in_the_first_second_turn(engine)
    made = actor(place, bus, publisher, *TWICE, "bus.inline_limit_bytes=64")
    await issue(made, ["ask"])
    async with running(made), asyncio.timeout(DEADLINE_S):
        await asked.wait()
    return made


async def test_a_full_disk_at_the_hand_over_costs_the_generations_and_not_the_actor(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = StubEngine()
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        with monkeypatch.context() as patch:
            patch.setattr(BlobStore, "put", is_full)
            drained = await drained_with_generations(tmp_path, bus, publisher, engine)
        assert drained.tally["handed_over"] == 0
        (entry,) = await until(bus, "tasks", 1)
        assert entry.subject.startswith(f"ph.{bus.run}.tasks.p1."), "given back as it was"
        async with running(actor(tmp_path, bus, publisher, *TWICE)):
            await until(bus, "episodes", 1)


@pytest.mark.parametrize("error", [BlobRefusedError("wrong token"), BlobUnreachableError("away"), OSError(5, "EIO")])
@pytest.mark.parametrize(("faults", "made_again"), [(1, 0), (99, 1)])
async def test_generations_that_cannot_be_read_now_are_tried_again_and_at_last_made_again(
    tmp_path: Path,
    bus: Bus,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    faults: int,
    made_again: int,
    error: Exception,
) -> None:
    """One fault costs a try; where they do not end, the last try costs the first turn."""
    engine = StubEngine()
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        await drained_with_generations(tmp_path, bus, publisher, engine)
        next_one = actor(tmp_path, bus, publisher, *TWICE, "bus.max_deliver=4")
        real, left, asked = next_one.context.blobs.get, [error] * faults, engine.requests.total()

        async def get(ref: BlobRef) -> bytes:
            if left:
                raise left.pop()
            return await real(ref)

        monkeypatch.setattr(next_one.context.blobs, "get", get)
        async with running(next_one):
            (entry,) = await until(bus, "episodes", 1)
    assert engine.requests.total() == asked + 1 + made_again
    (sample,) = (await read_execution(next_one.context, entry.headers, entry.data)).samples
    assert sample.token_ids.tolist() == [1, 2, 0, 7, 8, 9, 7, 8]
    assert (await log.state(bus, "dead")).messages == 0


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
