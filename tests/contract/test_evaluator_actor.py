"""The evaluator scores one version exactly once, waits for engines that serve it, and is not misled by leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from actor_fixture import eventually, make_context, register_until, running
from bus_fixture import DEADLINE_S, OwnServer

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.evaluator.actor import EvaluatorActor
from physarum.actors.evaluator.errors import NoProblemError
from physarum.actors.states import EvalScore, Head, TrainerDone
from physarum.actors.wire import publish_execution
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.log import scan
from physarum.bus.metrics import decode_metric
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.register import Register
from physarum.bus.version import Span
from physarum.bus.work import WorkQueue

HELD_OUT = "evaluation.hook=physarum.agents.calculator.problems:HeldOut"


def evaluator(folder: Path, bus: Bus, publisher: Publisher, *overrides: str) -> EvaluatorActor:
    context = make_context(folder, bus, publisher, "evaluator", HELD_OUT, "evaluation.problems=8", *overrides)
    return EvaluatorActor(context)


async def publish_head(context: Context, number: int) -> None:
    head = Head(label=f"policy@1.{number}", epoch=1, number=number, manifest="", total_bytes=0, published_at=0.0)
    await Register(context.bus, context.publisher, "weights", Head).put(head, states.HEAD, "policy")


async def engine(
    context: Context,
    version: str,
    *,
    instance: str = "policy-0",
    state: str = "ready",
    sequence: int = 1,
    group: str = "policy",
) -> None:
    beat = Heartbeat(
        role="engine", instance=instance, state=state, pid=1, host="h", started_at=1.0, sequence=sequence,
        facts={"url": "http://x", "version": version, "group": group},
    )  # fmt: skip
    await announce(context.bus, context.publisher, beat)


def answer(task: Task, reward: float, version: str) -> Execution:
    sample = Sample(
        token_ids=np.arange(3, dtype=np.int32),
        prompt_len=1,
        loss_mask=np.ones(2, np.bool_),
        logprobs=np.zeros(2, np.float32),
        spans=[Span(version, 0, 2)],
        reward=reward,
    )
    return Execution(id=f"{task.id}:x", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)


@contextlib.asynccontextmanager
async def workers(context: Context, version: str, *, skip: int = 0, bury: int = 0) -> AsyncIterator[list[Task]]:
    """Answers evaluation tasks: even indices right, odd ones wrong; the first `skip` never, the next `bury` die."""
    seen: list[Task] = []

    async def work(queue: WorkQueue) -> None:
        while True:
            for delivery in await queue.fetch(16, 1.0):
                task = decode(delivery.data, Task)
                seen.append(task)
                if task.ordinal < skip:
                    continue
                if task.ordinal < skip + bury:
                    await delivery.bury("poison")
                    continue
                await publish_execution(context, "evals", answer(task, float(task.ordinal % 2 == 0), version))
                await delivery.ack()

    queue = WorkQueue(context.bus, context.publisher, "tasks", "tasks_eval", worker="w", ack_wait_s=30.0, max_deliver=5)
    async with queue.open():
        running_work = asyncio.create_task(work(queue))
        try:
            yield seen
        finally:
            running_work.cancel()


async def score(context: Context, key: str = states.EVAL_START) -> EvalScore:
    return await register_until(context.run_register(EvalScore), lambda value: True, key)


async def test_scores_start_and_end_at_their_own_versions(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    actor = evaluator(tmp_path, bus, publisher)
    context = actor.context
    async with running(actor):
        async with workers(context, "policy@1.0") as seen:
            await publish_head(context, 0)
            await engine(context, "policy@1.0")
            start = await score(context)
        assert (start.version, start.score, start.problems, start.scored, start.off_version) == (
            "policy@1.0",
            0.5,
            8,
            8,
            0,
        )
        assert {task.task_class for task in seen} == {"eval"} and len({task.group for task in seen}) == 8
        assert seen[0].source.startswith("eval/policy@1.0/")
        async with workers(context, "policy@1.7"):
            await engine(context, "policy@1.7", sequence=2)
            done = TrainerDone(reason="steps", version="policy@1.7", steps=7, model="", at=time.time())
            await context.run_register(TrainerDone).put(done, states.TRAINER_DONE)
            end = await score(context, states.EVAL_END)
        assert (end.version, end.score, end.off_version) == ("policy@1.7", 0.5, 0)
    metrics = [decode_metric(entry) for entry in await scan(bus, "metrics")]
    assert [(metric.kind, metric.values["when"], metric.values["score"]) for metric in metrics] == [
        ("eval", "start", 0.5),
        ("eval", "end", 0.5),
    ]


async def test_waits_until_every_ready_engine_serves_the_version(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    actor = evaluator(tmp_path, bus, publisher)
    context = actor.context
    async with running(actor), workers(context, "policy@1.0") as seen:
        await publish_head(context, 0)
        await engine(context, "policy@1.0", instance="policy-0")
        await engine(context, "policy@0.0", instance="policy-1")
        await engine(context, "policy@0.0", instance="policy-2", state="starting")
        # The wait is open: as long as policy-1 serves another version nothing may be issued.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await score(context)
        assert seen == []
        await engine(context, "policy@1.0", instance="policy-1", sequence=2)
        assert (await score(context)).scored == 8


async def test_dead_and_missing_problems_count_zero_and_are_reported(
    tmp_path: Path, bus: Bus, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    actor = evaluator(tmp_path, bus, publisher, "evaluation.timeout_s=1.5")
    context = actor.context
    async with running(actor), workers(context, "policy@0.9", skip=1, bury=2):
        await publish_head(context, 0)
        await engine(context, "policy@1.0")
        start = await score(context)
    # Problems 0 (missing), 1 and 2 (dead) count 0; of 3..7 the even ones 4 and 6 are right.
    assert (start.score, start.problems, start.scored, start.off_version) == (2 / 8, 8, 5, 5)
    assert "1 of 8 answers have no result after evaluation.timeout_s = 1.5 s" in caplog.text
    assert "2 answers are dead" in caplog.text


async def test_one_that_is_killed_in_the_middle_starts_anew_and_ignores_old_answers(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    first = evaluator(tmp_path, bus, publisher)
    await publish_head(first.context, 0)
    await engine(first.context, "policy@1.0")
    killed = asyncio.create_task(first.run())
    async with workers(first.context, "policy@1.0", skip=8) as old:
        await eventually(lambda: len(old) == 8)
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
    second = evaluator(tmp_path, bus, publisher)
    async with running(second), workers(second.context, "policy@1.0"):
        for task in old:
            await publish_execution(second.context, "evals", answer(task, 1.0, "policy@1.0"))
        assert (await score(second.context)).score == 0.5


async def test_a_score_that_is_there_is_not_made_again(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    actor = evaluator(tmp_path, bus, publisher, "evaluation.at_end=false")
    there = EvalScore(
        version="policy@1.0", score=0.9, problems=8, scored=8, off_version=0, started_at=0.0, finished_at=1.0
    )
    await actor.context.run_register(EvalScore).put(there, states.EVAL_START)
    done = TrainerDone(reason="steps", version="policy@1.7", steps=7, model="", at=0.0)
    await actor.context.run_register(TrainerDone).put(done, states.TRAINER_DONE)
    async with running(actor), workers(actor.context, "policy@1.0") as seen:
        await eventually(lambda: actor.state == "finished")
        assert seen == []
    assert await score(actor.context) == there


async def test_every_few_versions_a_metric_is_emitted(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    actor = evaluator(tmp_path, bus, publisher, "evaluation.at_start=false", "evaluation.every_versions=2")
    context = actor.context
    emitted: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def emit(kind: str, values: dict[str, object]) -> None:
        emitted.put_nowait(values)

    context.emit = emit  # type: ignore[method-assign]
    async with running(actor), workers(context, "policy@1.2"):
        await publish_head(context, 0)
        await engine(context, "policy@1.0")
        await publish_head(context, 1)
        await publish_head(context, 2)
        await engine(context, "policy@1.2", sequence=2)
        async with asyncio.timeout(DEADLINE_S):
            values = await emitted.get()
    assert (values["when"], values["version"], values["score"], values["off_version"]) == (
        "between",
        "policy@1.2",
        0.5,
        0,
    )


async def test_no_usable_problem_is_an_error_that_names_it(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    context = make_context(tmp_path, bus, publisher, "evaluator", f"evaluation.data={data}")
    with pytest.raises(NoProblemError, match="no usable problem in 1 rows; expected at least one"):
        await EvaluatorActor(context).run()


async def test_a_killed_server_is_waited_for(tmp_path: Path, own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    actor = evaluator(tmp_path, own_bus, publisher)
    context = actor.context
    async with running(actor) as work:
        await asyncio.to_thread(own_server.kill)
        await own_server.start()
        async with workers(context, "policy@1.0"):
            await publish_head(context, 0)
            await engine(context, "policy@1.0")
            assert (await score(context)).score == 0.5
            await asyncio.to_thread(own_server.kill)
            await own_server.start()
            done = TrainerDone(reason="steps", version="policy@1.0", steps=7, model="", at=0.0)
            await context.run_register(TrainerDone).put(done, states.TRAINER_DONE, deadline_s=DEADLINE_S)
            await engine(context, "policy@1.0", sequence=3)
            assert (await score(context, states.EVAL_END)).score == 0.5
        assert not work.done()


async def test_sets_are_scored_one_after_the_other_and_kept_by_version(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Four answers to each problem of one set; even ordinals are right, so half of them."""
    hook = "hook: 'physarum.agents.calculator.problems:HeldOut'"
    sets = f"{{small: {{{hook}, problems: 2, samples: 4, pass_at: [1, 4]}}, large: {{{hook}, problems: 4}}}}"
    context = make_context(
        tmp_path, bus, publisher, "evaluator", f"evaluation.sets={sets}", "evaluation.every_versions=1"
    )
    actor = EvaluatorActor(context)
    async with running(actor), workers(context, "policy@1.0") as seen:
        await publish_head(context, 0)
        await engine(context, "policy@1.0")
        start = await score(context)
        assert {name: (one.score, one.scored) for name, one in start.sets.items()} == {
            "small": (0.5, 8),
            "large": (0.5, 4),
        }
        assert start.sets["small"].pass_at == {1: 0.5, 4: 1.0}
        assert (start.score, start.problems, start.scored) == (0.5, 6, 12)
        assert [task.source.rpartition("/")[2] for task in seen] == ["small"] * 8 + ["large"] * 4
        assert [task.group_size for task in seen] == [4] * 8 + [1] * 4
        await engine(context, "policy@1.1", sequence=2)
        await publish_head(context, 1)
        later = await register_until(context.run_register(EvalScore), lambda value: True, states.EVAL_AT, "policy@1.1")
    assert later.off_version == 12
    kept = await context.run_register(EvalScore).entries(states.EVAL_AT)
    assert sorted(one.version for one in kept) == ["policy@1.0", "policy@1.1"]


async def test_engines_that_are_kept_for_evaluations_are_told_which_version_to_serve_and_waited_for(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """The head goes on; they stay where the evaluator put them, and the others are no matter."""
    actor = evaluator(tmp_path, bus, publisher, "engines={policy: {}, aside: {}}", "evaluation.engines=aside")
    context = actor.context
    heads = Register(bus, publisher, "weights", Head)
    async with running(actor), workers(context, "policy@1.0") as seen:
        await publish_head(context, 0)
        held = await register_until(heads, lambda value: True, states.EVAL_HEAD, "policy")
        assert (held.label, held.number) == ("policy@1.0", 0)
        await engine(context, "policy@1.0")
        await publish_head(context, 1)
        assert not seen, "none of those that are kept serves it yet"
        await engine(context, "policy@1.0", instance="aside-0", group="aside")
        assert (await score(context)).off_version == 0
    entry = await heads.get(states.EVAL_HEAD, "policy")
    assert entry.value is not None and entry.value.label == "policy@1.0"


async def test_with_overflow_wait_every_version_that_was_due_is_evaluated_in_order_also_after_a_restart(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Versions 2, 4 and 6 are due before the engines serve 2; the evaluator is started anew in between."""
    words = (
        "engines={policy: {}, aside: {}}", "evaluation.engines=aside", "evaluation.overflow=wait",
        "evaluation.every_versions=2", "evaluation.at_start=false",
    )  # fmt: skip
    actor = evaluator(tmp_path, bus, publisher, *words)
    context = actor.context
    due = Register(bus, publisher, "weights", states.Pins)
    async with running(actor):
        await publish_head(context, 0)
        await register_until(due, lambda value: not value.labels, states.EVAL_DUE, "policy")
        for number in (2, 3, 4, 6):
            await publish_head(context, number)
            if number != 3:
                await register_until(
                    due, lambda value, label=f"policy@1.{number}": label in value.labels, states.EVAL_DUE, "policy"
                )
    again = evaluator(tmp_path, bus, publisher, *words)
    async with running(again), workers(context, "policy@1.2") as seen:
        for sequence, number in enumerate((2, 4, 6), 1):
            await register_until(
                Register(bus, publisher, "weights", Head),
                lambda value, wanted=number: value.number == wanted, states.EVAL_HEAD, "policy",
            )  # fmt: skip
            await engine(context, f"policy@1.{number}", instance="aside-0", group="aside", sequence=sequence)
        await register_until(due, lambda value: not value.labels, states.EVAL_DUE, "policy")
    kept = await context.run_register(EvalScore).entries(states.EVAL_AT)
    assert sorted(one.version for one in kept) == ["policy@1.2", "policy@1.4", "policy@1.6"]
    assert [task.source.split("/")[1] for task in seen] == [
        f"policy@1.{number}" for number in (2, 4, 6) for _ in range(8)
    ]
