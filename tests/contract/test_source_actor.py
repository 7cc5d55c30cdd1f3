"""The source issues each row once, never more than the age bound allows, and goes on where it was killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from actor_fixture import actor_process, make_context, register_until, running
from bus_fixture import DEADLINE_S, Connect, OwnServer

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.source.actor import SourceActor
from physarum.actors.source.errors import UnusableSourceError
from physarum.actors.states import EvalScore, SourcePosition
from physarum.actors.waiting import until
from physarum.bus import log, names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.errors import LeaseLostError
from physarum.bus.ledger import Ledger, Planned, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.work import WorkQueue

LIMIT = 8  # (bound 1 + 1) * 2 groups per batch * group size 2


@pytest_asyncio.fixture
async def queue(bus: Bus, publisher: Publisher) -> AsyncIterator[WorkQueue]:
    made = WorkQueue(bus, publisher, "tasks", "tasks_p1", worker="test", ack_wait_s=5.0, max_deliver=1)
    async with made.open():
        yield made


async def take(queue: WorkQueue, count: int) -> list[Task]:
    """Exactly `count` tasks, acknowledged."""
    found: list[Task] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            for delivery in await queue.fetch(count - len(found), 1.0):
                found.append(decode(delivery.data, Task))
                await delivery.ack()
    return found


async def issued(context: Context, count: int) -> SourcePosition:
    register = context.run_register(SourcePosition)
    return await register_until(register, lambda value: value.issued == count, states.SOURCE_POSITION, "main")


def plan(tasks: list[Task], at_number: int, epoch: int = 1) -> PlanRecord:
    executions = [
        Planned(
            sequence=task.ordinal + 1,
            task=task.id,
            source=task.source,
            ordinal=task.ordinal,
            attempt=0,
            group=task.group,
            advantage=0.0,
            trained_tokens=1,
            masked_tokens=0,
            masks=[],
        )
        for task in tasks
    ]
    return PlanRecord(epoch=epoch, at_number=at_number, executions=executions)


def step(number: int, plan_sequence: int, epoch: int = 1) -> StepRecord:
    return StepRecord(
        epoch=epoch,
        number=number,
        plan=plan_sequence,
        changed=True,
        trained=4,
        masked=0,
        tokens_trained=4,
        tokens_masked=0,
        ages={},
        multi_version_samples=0,
        reward_mean=None,
        wait_s=0.0,
        started_at=0.0,
        finished_at=1.0,
    )


async def test_issues_up_to_the_limit_and_more_only_for_what_steps_disposed_of(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    context = make_context(tmp_path, bus, publisher, "source")
    async with running(SourceActor(context)):
        tasks = await take(queue, LIMIT)
        assert [task.id for task in sorted(tasks, key=lambda task: task.ordinal)] == [
            f"main/0/{index}/{member}" for index in range(4) for member in range(2)
        ]
        assert {task.group for task in tasks} == {f"main/0/{index}" for index in range(4)}
        assert tasks[0].sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 256}
        await issued(context, LIMIT)
        assert await queue.fetch(1, 0.3) == []
        ledger = Ledger(bus, publisher, 0, 1)
        await ledger.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        sequence = await ledger.append(plan(sorted(tasks, key=lambda task: task.ordinal)[:4], 0))
        await ledger.append(step(1, sequence))
        more = await take(queue, 4)
        assert sorted(task.ordinal for task in more) == [8, 9, 10, 11]
        await issued(context, LIMIT + 4)
        assert await queue.fetch(1, 0.3) == []


async def test_a_dead_task_makes_room_and_dead_evaluations_do_not(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    context = make_context(tmp_path, bus, publisher, "source")
    async with running(SourceActor(context)):
        await take(queue, LIMIT - 2)
        async with asyncio.timeout(DEADLINE_S):
            last = [*await queue.fetch(1, 5.0), *await queue.fetch(1, 5.0)]
        evaluation = Task(
            id="eval/x/0", run=bus.run, source="main", ordinal=99, group="g", group_size=1, member=0, task_class="eval"
        )
        subject = names.subject(bus.run, "tasks", "eval", evaluation.id)
        await publisher.publish(subject, encode(evaluation), message_id="task/eval")
        evals = WorkQueue(bus, publisher, "tasks", "tasks_eval", worker="test", ack_wait_s=5.0, max_deliver=1)
        async with evals.open():
            for delivery in await evals.fetch(1, 5.0):
                await delivery.bury("not ours")
        await last[0].bury("poison")
        assert await queue.fetch(1, 0.3) == []  # one of a group of two: no room for a whole group yet
        await last[1].bury("poison")
        assert sorted(task.ordinal for task in await take(queue, 2)) == [8, 9]


async def test_a_killed_source_is_followed_by_one_that_issues_the_uncommitted_row_under_the_same_ids(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    context = make_context(
        tmp_path, bus, publisher, "source", "age.admission=free", "source.epochs=1", "source.args.size=20"
    )
    async with running(SourceActor(context)):
        await issued(context, 40)
    register = context.run_register(SourcePosition)
    entry = await register.get(states.SOURCE_POSITION, "main")
    assert entry.value is not None and entry.value.finished
    # As if the first source had been killed after publishing row 13 and before committing it.
    back = SourcePosition(epoch=0, index=13, issued=26, token=entry.value.token)
    await register.compare_and_set(back, entry.revision, states.SOURCE_POSITION, "main")
    again = make_context(
        tmp_path, bus, publisher, "source", "age.admission=free", "source.epochs=1", "source.args.size=20"
    )
    async with running(SourceActor(again)):
        position = await issued(again, 40)
        assert position.token == entry.value.token + 1
    found = await take(queue, 40)
    assert sorted(task.ordinal for task in found) == list(range(40))
    assert len({task.id for task in found}) == 40
    assert (await log.state(bus, "tasks")).messages == 0


async def test_a_standby_takes_over_and_the_old_owner_is_refused(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue, connect_again: Connect
) -> None:
    first = make_context(tmp_path, bus, publisher, "source")
    other = await connect_again("source-1")
    standby = make_context(tmp_path, other, await Publisher(other).start(), "source", instance="source-1")
    old = SourceActor(first)
    async with running(old):
        await issued(first, LIMIT)
        waiting = SourceActor(standby)
        async with running(waiting) as second:
            old.context.draining.set()
            taken = await register_until(
                standby.run_register(SourcePosition), lambda value: value.token > 1, states.SOURCE_POSITION, "main"
            )
            assert taken.issued == LIMIT
            assert not second.done()
            with pytest.raises(LeaseLostError, match="moved to .* by another source"):
                await old._keeper.move(SourcePosition(epoch=0, index=5, issued=10, token=1))


async def test_waits_for_the_evaluation_of_the_start_version(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue
) -> None:
    hook = "physarum.agents.calculator.problems:HeldOut"
    context = make_context(tmp_path, bus, publisher, "source", f"evaluation.hook={hook}")
    async with running(SourceActor(context)):
        await issued(context, 0)
        assert await queue.fetch(1, 0.3) == []
        score = EvalScore(
            version="policy@1.0", score=0.3, problems=4, scored=4, off_version=0, started_at=0, finished_at=1
        )
        await context.run_register(EvalScore).put(score, states.EVAL_START)
        assert len(await take(queue, LIMIT)) == LIMIT


async def test_pause_holds_and_resume_goes_on(tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue) -> None:
    context = make_context(tmp_path, bus, publisher, "source")
    context.pause()
    async with running(SourceActor(context)):
        await issued(context, 0)
        assert await queue.fetch(1, 0.3) == []
        context.resume()
        assert len(await take(queue, LIMIT)) == LIMIT


async def test_broken_lines_are_skipped_counted_and_named(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"q": "a"}\n{broken\n\n{"no": 1}\n{"q": "b", "metadata": [1]}\n{"q": "c", "a": 3}\n')
    context = make_context(
        tmp_path, bus, publisher, "source", f"source.data={data}", "source.hook=null", "source.epochs=1",
        "source.columns.prompt=q", "source.columns.label=a",
    )  # fmt: skip
    actor = SourceActor(context)
    async with running(actor):
        await register_until(
            context.run_register(SourcePosition), lambda value: value.finished, states.SOURCE_POSITION, "main"
        )
        found = {(task.prompt, task.label) for task in await take(queue, 4)}
        assert found == {("a", None), ("c", 3)}
        assert actor.numbers["broken_rows"] == 3
    assert f"{data}:2: not JSON" in caplog.text
    assert f"{data}:4: no column `q`" in caplog.text
    assert f"{data}:5: `metadata` is list" in caplog.text


async def test_rows_bring_their_own_sampling_and_those_that_cannot_be_are_broken_rows(
    tmp_path: Path, bus: Bus, publisher: Publisher, queue: WorkQueue, caplog: pytest.LogCaptureFixture
) -> None:
    own = ('{"top_p": 0.5}', '{"topp": 0.5}', '{"temperature": 0.2}', '{"temperature": 1.0}')
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"q": "{k}", "metadata": {{"sampling": {one}}}}}\n' for k, one in enumerate(own)))
    context = make_context(
        tmp_path, bus, publisher, "source", f"source.data={data}", "source.hook=null", "source.epochs=1",
        "source.columns.prompt=q", "rollout.sampling.min_p=0.1",
    )  # fmt: skip
    actor = SourceActor(context)
    async with running(actor):
        await register_until(
            context.run_register(SourcePosition), lambda value: value.finished, states.SOURCE_POSITION, "main"
        )
        found = {task.prompt: (task.sampling["top_p"], task.sampling["min_p"]) for task in await take(queue, 4)}
        assert found == {"0": (0.5, 0.1), "3": (1.0, 0.1)}
        assert actor.numbers["broken_rows"] == 2
    assert (
        f"{data}:2: metadata.sampling: 'topp' is no sampling parameter of SGLang; did you mean 'top_p'" in caplog.text
    )
    assert "temperature is 0.2; expected 1, as rollout.sampling has it" in caplog.text


async def test_a_sections_sampling_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = make_context(tmp_path, bus, publisher, "source", "source.metadata={sampling: {topp: 0.5}}")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await SourceActor(context).run()
    assert caught.group_contains(UnusableSourceError, match="the section's `metadata`.*did you mean 'top_p'")


async def test_data_without_a_usable_row_is_refused_by_name(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"no": 1}\n')
    context = make_context(tmp_path, bus, publisher, "source", f"source.data={data}", "source.hook=null")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await SourceActor(context).run()
    assert caught.group_contains(UnusableSourceError, match=r"holds no usable one \(1 are broken\)")


async def test_a_killed_server_stops_nothing_and_no_task_is_issued_twice(
    tmp_path: Path, own_server: OwnServer, own_bus: Bus
) -> None:
    publisher = await Publisher(own_bus).start()
    context = make_context(
        tmp_path, own_bus, publisher, "source", "age.admission=free", "source.epochs=1", "source.args.size=2000"
    )
    register = context.run_register(SourcePosition)
    async with running(SourceActor(context)):
        await register_until(register, lambda value: value.issued > 200, states.SOURCE_POSITION, "main")
        await asyncio.to_thread(own_server.kill)
        await own_server.start()
        async with asyncio.timeout(DEADLINE_S):
            await until(register, lambda value: value.finished, states.SOURCE_POSITION, "main")
    tasks = [decode(entry.data, Task) for entry in await log.scan(own_bus, "tasks")]
    assert sorted(task.ordinal for task in tasks) == list(range(4000))


async def test_a_killed_source_is_followed_after_its_lease_has_expired(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Real processes, SIGKILL while issuing; takes as long as the lease lasts."""
    options = ("age.admission=free", "source.epochs=1", "source.args.size=1500")
    context = make_context(tmp_path, bus, publisher, "source", *options)
    register = context.run_register(SourcePosition)
    with actor_process(context) as first:
        await register_until(register, lambda value: value.issued > 100, states.SOURCE_POSITION, "main")
        first.kill()
    with actor_process(make_context(tmp_path, bus, publisher, "source", *options, instance="source-1")) as second:
        await register_until(register, lambda value: value.finished, states.SOURCE_POSITION, "main")
        assert await asyncio.to_thread(second.drain) == 0, second.log.read_text()
    tasks = [decode(entry.data, Task) for entry in await log.scan(bus, "tasks")]
    assert sorted(task.ordinal for task in tasks) == list(range(3000))
    assert len({task.id for task in tasks}) == 3000
