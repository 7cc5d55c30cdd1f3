"""Faults that need the whole line: surplus, slow trainers, short data, slow siblings, poison, sinks that are off."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_line import HOOKS, ChainedWorld, Line, line

from physarum.actors.errors import UnrecoverableError
from physarum.actors.tools.archive import Archive
from physarum.actors.trainer.batch import StepResult
from physarum.actors.trainer.errors import EmptyBatch, SequenceTooLong, TrainerError
from physarum.actors.wire import read_header
from physarum.bus import ledger, log, names
from physarum.bus.connection import Bus
from physarum.bus.ledger import GroupClosedRecord, PlanRecord, StepRecord
from physarum.bus.names import RUN_HEADER
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


def each_once(*ordinals: int) -> Counter[tuple[int, int]]:
    return Counter((ordinal, 0) for ordinal in ordinals)


@pytest.fixture
def closed_gate() -> Iterator[None]:
    """The trainer's first step does not end before the test opens the gate."""
    ChainedWorld.gate.clear()
    yield
    ChainedWorld.gate.set()


async def stored(bus: Bus) -> dict[str, int]:
    return {key: (await log.state(bus, key)).messages for key in ("tasks", "episodes", "samples")}  # type: ignore[arg-type]


async def until_stored(run: Line, samples: int) -> None:
    """Until SAMPLES holds so many executions, and the acknowledgements that they caused have emptied the queues."""
    expected = {"tasks": 0, "episodes": 0, "samples": samples}
    async with asyncio.timeout(20.0):
        while await stored(run.bus) != expected:
            await asyncio.sleep(0.02)


async def test_a_surplus_over_the_batch_is_never_dropped(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """1536 executions, batches of 8: each is trained exactly once (a worker that drained its queue lost the rest)."""
    overrides = ["source.args.size=192", "source.group_size=8", "trainer.groups_per_batch=1", "age.bound=31"]
    async with line(tmp_path, bus, publisher, *overrides, "rollout.slots=64", "trainer.checkpoint_every=50") as run:
        await run.done()
        made = await run.check(each_once(*range(1536)))
    assert (made.dropped, made.dead, made.in_flight) == (0, 0, 0)


async def test_a_slow_trainer_holds_the_source_and_nothing_is_dropped(
    tmp_path: Path, bus: Bus, publisher: Publisher, closed_gate: None
) -> None:
    """Under way are at most (K + 1) batches: 2 * 2 groups of 2. What waits, waits in the streams, not in memory."""
    async with line(tmp_path, bus, publisher) as run:
        await until_stored(run, 8)
        assert run.actors["source"].numbers["outstanding"] == run.actors["source"].numbers["issued"] == 8
        ChainedWorld.gate.set()
        await run.done()
        made = await run.check(each_once(*range(40)))
    assert made.dropped == 0
    assert (await log.state(bus, "samples")).messages < 40, "what checkpoints cover was trimmed"


async def test_ten_prompts_last_a_hundred_steps(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """A data set smaller than the run is passed over again and again; a batch may span two passes."""
    overrides = ["source.args.size=10", "source.epochs=null", "trainer.groups_per_batch=3", "stop.steps=100"]
    async with line(tmp_path, bus, publisher, *overrides, "trainer.checkpoint_every=20") as run:
        done = await run.done()
        made = await run.account()
    assert (done.steps, done.reason) == (100, "stop.steps = 100")
    assert made.closes
    assert made.trained == 600


async def test_the_end_of_the_data_ends_the_run_and_trains_the_rest(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """20 groups in batches of 3: six full ones and a rest of two groups, which no further group will ever fill."""
    async with line(tmp_path, bus, publisher, "trainer.groups_per_batch=3") as run:
        done = await run.done()
        await run.check(each_once(*range(40)))
    assert done.steps == 7
    assert done.reason == "the source is exhausted (source.epochs = 1)"


async def test_a_slow_sibling_does_not_hold_the_step(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """Member 1 of row 0 never returns: its group is closed at its deadline without it, by record, and it is cut off."""
    overrides = ["source.args.habits.0=second-hangs", "groups.deadline_s=0.5", "rollout.episode_timeout_s=600"]
    async with line(tmp_path, bus, publisher, *overrides, "bus.max_deliver=1") as run:
        await run.done()
        made = await run.check(each_once(*(ordinal for ordinal in range(40) if ordinal != 1)))
        closed = [item.record for item in await ledger.read(bus) if isinstance(item.record, GroupClosedRecord)]
    assert [(record.group, record.missing, record.trained) for record in closed] == [("main/0/0", [1], True)]
    assert (made.dead, made.in_flight, made.dropped_by_reason) == (0, 0, {"late": 1})


@pytest.mark.parametrize("rejected", [2, 9], ids=["some", "as many as a batch and more, one after the other"])
async def test_rejected_groups_are_accounted_and_make_room_for_others(
    tmp_path: Path, bus: Bus, publisher: Publisher, rejected: int
) -> None:
    """The filter refuses the first groups; 2 batches of 2 groups may be out: the source must hear of what was dropped."""
    chosen = f"filters.groups=[{{kind: hook, hook: '{HOOKS}:row_at_least', args: {{row: {rejected}}}}}]"
    async with line(tmp_path, bus, publisher, chosen) as run:
        done = await run.done()
        made = await run.check(each_once(*range(2 * rejected, 40)))
    assert (made.dropped, made.dropped_by_reason) == (2 * rejected, {"filtered": 2 * rejected})
    assert done.reason == "the source is exhausted (source.epochs = 1)"


async def test_a_filter_that_lets_nothing_pass_ends_the_trainer_by_name(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    chosen = [
        f"filters.groups=[{{kind: hook, hook: '{HOOKS}:row_at_least', args: {{row: 1000}}}}]",
        "filters.max_rejected=6",
    ]
    with pytest.raises(ExceptionGroup) as met:
        async with line(tmp_path, bus, publisher, *chosen) as run:
            await run.done()
    assert met.group_contains(UnrecoverableError, match="filter hook rejected 7 groups one after the other")


async def test_one_rejected_group_does_not_hold_a_source_that_may_let_out_one_batch(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """age.bound 0: 2 groups are out, one of them is rejected; the source hears of it before the next batch is full."""
    chosen = f"filters.groups=[{{kind: hook, hook: '{HOOKS}:row_at_least', args: {{row: 1}}}}]"
    async with line(tmp_path, bus, publisher, chosen, "age.bound=0") as run:
        await run.done()
        made = await run.check(each_once(*range(2, 40)))
    assert made.dropped_by_reason == {"filtered": 2}


async def test_groups_rejected_execution_by_execution_make_room_too(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    chosen = f"filters.executions=[{{kind: hook, hook: '{HOOKS}:row_at_least', args: {{row: 9}}}}]"
    async with line(tmp_path, bus, publisher, chosen) as run:
        await run.done()
        made = await run.check(each_once(*range(18, 40)))
    assert made.dropped_by_reason == {"filtered": 18}


async def test_the_line_of_admission_goes_on_behind_members_that_died(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Consumption `wait`; both members of row 0 are trained as refills: row 4 comes only when others were trained."""
    options = ["age.consumption=wait", "source.args.habits.0=die-first", f"rollout.args.folder={tmp_path}"]
    async with line(tmp_path, bus, publisher, *options, "bus.max_deliver=1") as run:
        await run.done()
        await run.check(Counter({(0, 1): 1, (1, 1): 1}) + each_once(*range(2, 40)))
        plans = [item.record for item in await ledger.read(bus) if isinstance(item.record, PlanRecord)]
    assert [one.ordinal for plan in plans for one in plan.executions] == list(range(40))


@pytest.mark.parametrize("error", [EmptyBatch("no pair"), SequenceTooLong(0, 9, 8)], ids=["empty", "too long"])
async def test_a_plan_that_cannot_be_executed_is_refused_by_record(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, error: TrainerError
) -> None:
    """It would be replayed verbatim by every successor, and end each of them."""
    step, met = ChainedWorld.step, []

    def refusing(world: ChainedWorld, *batch: Any, **more: Any) -> StepResult:
        if not met:
            met.append(error)
            raise error
        return step(world, *batch, **more)

    monkeypatch.setattr(ChainedWorld, "step", refusing)
    async with line(tmp_path, bus, publisher) as run:
        await run.done()
        made = await run.account()
        steps = [item.record for item in await ledger.read(bus) if isinstance(item.record, StepRecord)]
    assert [one.refused for one in steps if one.refused] == [str(error)]
    assert (made.trained, made.dropped_by_reason, made.closes) == (36, {"refused": 4}, True)


async def test_a_poison_prompt_is_given_up_and_the_steps_go_on(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """Every try of row 0 raises, the refills' too: four dead letters, and its group makes no plan."""
    async with line(tmp_path, bus, publisher, "source.args.habits.0=raise", "bus.max_deliver=2") as run:
        await run.done()
        made = await run.check(each_once(*range(2, 40)))
    assert (made.issued, made.dead) == (42, 4), "two members and a refill of each"


async def test_a_member_that_died_is_refilled_and_trained_with_its_group(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Both members of row 0 use up their tries; their next attempts succeed."""
    habit, folder = "source.args.habits.0=die-first", f"rollout.args.folder={tmp_path}"
    async with line(tmp_path, bus, publisher, habit, folder, "bus.max_deliver=1") as run:
        await run.done()
        made = await run.check(Counter({(0, 1): 1, (1, 1): 1}) + each_once(*range(2, 40)))
    assert (made.issued, made.dead) == (42, 2)


async def test_a_task_that_raised_is_trained_exactly_once_later(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """Every other row raises at its first try; none is gone for ever, none comes twice."""
    habits = [f"source.args.habits.{index}=raise 1" for index in range(0, 20, 2)]
    async with line(tmp_path, bus, publisher, *habits, f"rollout.args.folder={tmp_path}") as run:
        await run.done()
        made = await run.check(each_once(*range(40)))
    assert (made.dead, made.duplicates) == (0, 0)


async def test_turning_the_sinks_off_does_not_turn_training_off(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """Without a stream for metrics and without logs the same samples are trained."""
    await bus.api(f"STREAM.DELETE.{names.stream(bus.run, 'metrics')}")
    logging.disable(logging.CRITICAL)
    try:
        async with line(tmp_path, bus, publisher) as run:
            await run.done()
            await run.check(each_once(*range(40)))
    finally:
        logging.disable(logging.NOTSET)
        await bus.api(
            f"STREAM.CREATE.{names.stream(bus.run, 'metrics')}",
            {"name": names.stream(bus.run, "metrics"), "subjects": [names.all_subjects(bus.run, "metrics")]},
        )


async def test_a_strangers_sample_is_counted_and_holds_up_nothing(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Another run's message lies first in our log: it is passed over, and the log is trimmed all the same."""
    stranger = names.subject(bus.run, "samples", "train", "x")
    await bus.client.publish(stranger, b"\x80", headers={RUN_HEADER: "another"})
    await bus.flush()
    async with line(tmp_path, bus, publisher, "trainer.checkpoint_every=1") as run:
        await run.done()
        await run.check(each_once(*range(40)))
    assert bus.foreign_messages >= 1
    assert (await log.state(bus, "samples")).first > 1


async def test_what_was_recorded_outlives_every_version(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """`samples.keep: all` over ten checkpoints, each of which trims the log: all 40 executions can still be read."""
    async with line(tmp_path, bus, publisher, "trainer.checkpoint_every=1", "samples.keep=all") as run:
        await run.done()
        await run.check(each_once(*range(40)))
        archive = Archive(run.folder.archive)
        kept = [entry for segment in archive.segments() for entry in archive.read(segment)]
        kept += await log.scan(bus, "samples")
    assert (await log.state(bus, "samples")).first > 1
    assert {read_header(entry.headers).ordinal for entry in kept} == set(range(40))
