"""Whether anything can still come, on a real bus: an execution is seen wherever it is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actor_fixture import make_context
from bus_fixture import DEADLINE_S

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.trainer.exhaustion import Exhaustion
from physarum.actors.wire import publish_task
from physarum.bus import names
from physarum.bus.connection import Bus
from physarum.bus.ledger import RefillRecord
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task


class Reader:
    """How far a trainer has read."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.samples_through = 0
        self.dead_through = 0
        self.refills: list[RefillRecord] = []


@pytest.fixture
def context(tmp_path: Path, bus: Bus, publisher: Publisher) -> Context:
    return make_context(tmp_path, bus, publisher, "trainer")


async def finish(context: Context, **changes: object) -> None:
    position = states.SourcePosition(epoch=1, index=0, issued=2, token=1, finished=True, **changes)  # type: ignore[arg-type]
    register = context.run_register(states.SourcePosition)
    await register.put(position, states.SOURCE_POSITION, context.config.source.name)


async def followed(context: Context, reader: Reader) -> tuple[Exhaustion, asyncio.Task[None]]:
    """The watcher once it has heard that the source is finished."""
    watch = Exhaustion(context, reader)
    task = asyncio.create_task(watch.follow())
    async with asyncio.timeout(DEADLINE_S):
        await reader.changed.wait()
    return watch, task


async def publish(context: Context, *tokens: str) -> int:
    subject = names.subject(context.bus.run, *tokens)  # type: ignore[arg-type]
    return (await context.publisher.publish(subject, b"x")).seq


async def test_a_source_with_rows_left_is_never_exhausted(context: Context) -> None:
    watch = Exhaustion(context, Reader())
    assert watch.look_again_s is None
    assert not await watch.reached(0)


async def test_an_execution_under_way_is_seen_in_every_stream(context: Context) -> None:
    await finish(context)
    reader = Reader()
    watch, task = await followed(context, reader)
    assert await watch.reached(0)
    for tokens in (("tasks", "p1", "t"), ("episodes", "train", "t")):
        sequence = await publish(context, *tokens)
        assert not await watch.reached(0), tokens
        stream = names.stream(context.bus.run, tokens[0])  # type: ignore[arg-type]
        await context.bus.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    reader.samples_through = await publish(context, "samples", "train", "t") - 1
    assert not await watch.reached(0)
    reader.samples_through += 1
    reader.dead_through = await publish(context, "dead", "s", "1") - 1
    assert not await watch.reached(0)
    reader.dead_through += 1
    assert await watch.reached(0)
    task.cancel()


async def test_evaluation_under_way_does_not_hold_up_the_end(context: Context) -> None:
    await finish(context)
    watch, task = await followed(context, Reader())
    await publish_task(
        context,
        Task(
            id="e/0", run=context.bus.run, source="e", ordinal=0, group="e", group_size=1, member=0, task_class="eval"
        ),
    )
    await publish(context, "episodes", "eval", "t")
    assert await watch.reached(0)
    task.cancel()


async def test_a_replacement_that_was_asked_for_and_not_issued_holds_up_the_end(context: Context) -> None:
    await finish(context)
    reader = Reader()
    watch, task = await followed(context, reader)
    assert not await watch.reached(1)
    reader.changed.clear()
    await finish(context, refills=1)
    async with asyncio.timeout(DEADLINE_S):
        await reader.changed.wait()
    assert await watch.reached(1)
    task.cancel()


async def test_looking_again_backs_off_to_a_bound(context: Context) -> None:
    await finish(context)
    watch, task = await followed(context, Reader())
    assert [watch.look_again_s for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    task.cancel()
