"""A source with a curriculum: it learns from plans, and a source that starts anew goes on exactly."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from actor_fixture import make_context, register_until, running
from test_source_actor import issued, plan, queue, step, take

from physarum.actors.source.actor import SourceActor
from physarum.actors.states import SOURCE_POSITION, SourcePosition
from physarum.bus.connection import Bus
from physarum.bus.ledger import Ledger, RefillRecord, RollbackRecord
from physarum.bus.publisher import Publisher
from physarum.bus.work import WorkQueue

pytestmark = pytest.mark.timeout(60)
__all__ = ["queue"]

STAGES = (
    "source.curriculum={hook: 'physarum.actors.source.curricula:Stages', args: {solved: 1.0, stages: "
    "[{from_version: 0}, {from_version: 1, group_size: 4, max_new_tokens: 64}]}}"
)


async def test_a_stage_begins_with_what_is_issued_after_its_version_and_refills_belong_to_their_own(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    context = make_context(tmp_path, bus, publisher, "source", STAGES)
    async with running(SourceActor(context)):
        first = sorted(await take(queue, 8), key=lambda task: task.ordinal)
        assert {task.group_size for task in first} == {2}
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        made = plan(first[:4], 1)
        scored = [msgspec.structs.replace(one, reward=1.0) for one in made.executions]
        sequence = await book.append(msgspec.structs.replace(made, executions=scored))
        await book.append(step(2, sequence))
        more = await take(queue, 4)
    assert {(task.group, task.group_size, task.sampling["max_new_tokens"]) for task in more} == {("main/0/4", 4, 64)}
    position = await issued(context, 12)
    assert [(stage.first, stage.state["stage"]) for stage in position.stages] == [(0, 0), (8, 1)]
    assert position.stages[-1].state["solved"] == [[0, 2]]

    await book.append(RefillRecord(source="main", ordinal=4, group="main/0/2", member=0, attempt=1))
    anew = make_context(tmp_path, bus, publisher, "source", STAGES)
    async with running(SourceActor(anew)):
        (again,) = await take(queue, 1)
    assert (again.id, again.group_size, again.sampling["max_new_tokens"]) == ("main/0/2/0+1", 2, 256)


async def test_rows_that_are_solved_are_left_out_of_later_epochs_and_the_source_ends_when_all_are(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    """Two rows, endless epochs; both solved in the first: nothing is left, and that is not an endless loop."""
    context = make_context(
        tmp_path, bus, publisher, "source", STAGES, "source.args.size=2", "source.shuffle=false", "age.bound=0",
        "trainer.groups_per_batch=2",
    )  # fmt: skip
    async with running(SourceActor(context)):
        first = sorted(await take(queue, 4), key=lambda task: task.ordinal)
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        made = plan(first, 0)
        scored = [msgspec.structs.replace(one, reward=1.0) for one in made.executions]
        sequence = await book.append(msgspec.structs.replace(made, executions=scored))
        await book.append(step(1, sequence))
        register = context.run_register(SourcePosition)
        ended = await register_until(register, lambda value: value.finished, SOURCE_POSITION, "main")
    assert ended.issued == 4
