"""A source with a curriculum: it learns from plans, and a source that starts anew goes on exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from actor_fixture import make_context, register_until, running
from test_source_actor import issued, plan, queue, step, take

from physarum.actors.source.actor import SourceActor
from physarum.actors.states import SOURCE_POSITION, SourcePosition
from physarum.bus import names
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.ledger import Ledger, RefillRecord, RollbackRecord
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.work import DeadLetter, WorkQueue

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
        more = await take(queue, 12)  # two batches of two groups of 4 are 16, and 4 are out
    assert {(task.group, task.group_size, task.sampling["max_new_tokens"]) for task in more} == {
        (f"main/0/{index}", 4, 64) for index in (4, 5, 6)
    }
    position = await issued(context, 20)
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


async def test_a_larger_group_size_lets_a_whole_batch_out(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    """K = 0, batches of 2 groups, groups grow from 2 to 32: a batch is 64 tasks, where 4 were."""
    grown = STAGES.replace("group_size: 4", "group_size: 32")
    context = make_context(tmp_path, bus, publisher, "source", grown, "age.bound=0")
    async with running(SourceActor(context)):
        first = sorted(await take(queue, 4), key=lambda task: task.ordinal)
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        made = plan(first, 1)
        scored = [msgspec.structs.replace(one, reward=0.0) for one in made.executions]
        await book.append(step(2, await book.append(msgspec.structs.replace(made, executions=scored))))
        more = await take(queue, 64)
    assert Counter(task.group for task in more) == {"main/0/2": 32, "main/0/3": 32}


@pytest.mark.parametrize("age", ["count", "pace"])
async def test_a_poison_prompts_refill_comes_after_newer_stages_and_is_what_was_issued(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue, age: str
) -> None:
    """Both members of the first row die, the rest is trained and a new stage begins; then a refill is asked for."""
    context = make_context(tmp_path, bus, publisher, "source", STAGES, f"age.admission={age}")
    async with running(SourceActor(context)):
        first = sorted(await take(queue, 8), key=lambda task: task.ordinal)
        for task in first[:2]:
            letter = dead_letter(bus.run, task)
            await publisher.publish(names.subject(bus.run, "dead", "x", str(task.ordinal)), encode(letter))
        await take(queue, 2)  # in the room of the dead
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        made = plan(first[2:], 1)
        scored = [msgspec.structs.replace(one, reward=0.5) for one in made.executions]
        sequence = await book.append(msgspec.structs.replace(made, executions=scored))
        await book.append(step(2, sequence))
        more = await take(queue, 8)
        assert {task.group_size for task in more} == {4}
        await book.append(RefillRecord(source="main", ordinal=1, group="main/0/0", member=1, attempt=1))
        again = await until_refill(queue)
    assert (again.id, again.group_size, again.prompt) == ("main/0/0/1+1", 2, first[1].prompt)


async def until_refill(queue: WorkQueue) -> Task:
    while True:
        (found,) = await take(queue, 1)
        if found.attempt:
            return found


def dead_letter(run: str, task: Task) -> DeadLetter:
    return DeadLetter(
        stream=names.stream(run, "tasks"), subject=names.subject(run, "tasks", "p1", task.id), sequence=1, key=task.id,
        reason="poison", deliveries=2, worker="w", at=0.0, headers={names.RUN_HEADER: run}, body=encode(task),
    )  # fmt: skip


async def test_after_the_last_row_the_curriculum_learns_on(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    """A source that has issued everything keeps no plans that nobody has looked at."""
    context = make_context(
        tmp_path,
        bus,
        publisher,
        "source",
        STAGES,
        "source.args.size=2",
        "source.epochs=1",
        "trainer.groups_per_batch=2",
    )
    register = context.run_register(SourcePosition)
    async with running(SourceActor(context)):
        first = sorted(await take(queue, 4), key=lambda task: task.ordinal)
        await register_until(register, lambda value: value.finished, SOURCE_POSITION, "main")
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        made = plan(first, 1)
        scored = [msgspec.structs.replace(one, reward=0.5) for one in made.executions]
        sequence = await book.append(msgspec.structs.replace(made, executions=scored))
        ended = await register_until(
            register, lambda value: value.observed_through == sequence, SOURCE_POSITION, "main"
        )
    assert ended.finished and ended.stages[-1].state["stage"] == 1
