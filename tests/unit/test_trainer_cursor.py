"""Cursor, interval sets, recovery from the ledger, stop rules."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.cursor import Cursor, CursorRecord
from physarum.actors.trainer.recovery import recover
from physarum.actors.trainer.stopping import StopRule
from physarum.bus.codec import decode, encode
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import (
    DurableRecord,
    LedgerRecord,
    Numbered,
    Planned,
    PlanRecord,
    RollbackRecord,
    StepRecord,
    surviving_steps,
)
from physarum.bus.version import Fork
from physarum.configs.stop import StopConfig


def plan(at_number: int, *sequences: int, epoch: int = 1) -> PlanRecord:
    executions = [Planned(s, f"t{s}", "s", s - 1, 0, "g", 0.0, 1, 0, []) for s in sequences]
    return PlanRecord(epoch=epoch, at_number=at_number, executions=executions)


def step(number: int, plan_sequence: int, epoch: int = 1, **more: object) -> StepRecord:
    values: dict[str, Any] = {
        "epoch": epoch, "number": number, "plan": plan_sequence, "changed": True, "trained": 1, "masked": 0,
        "tokens_trained": 1, "tokens_masked": 0, "ages": {}, "multi_version_samples": 0, "reward_mean": None,
        "wait_s": 0.0, "started_at": 0.0, "finished_at": 1.0,
    }  # fmt: skip
    return StepRecord(**{**values, **more})


def numbered(*records: LedgerRecord) -> list[Numbered]:
    return [Numbered(sequence, record) for sequence, record in enumerate(records, start=1)]


@given(st.lists(st.integers(0, 40)))
def test_an_interval_set_is_a_set(values: list[int]) -> None:
    made = IntervalSet()
    seen: set[int] = set()
    for value in values:
        assert made.add(value) == (value not in seen)
        seen.add(value)
    assert list(made) == sorted(seen)
    assert len(made) == len(seen)
    assert all((n in made) == (n in seen) for n in range(42))
    pairs = made.intervals()
    assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
    assert IntervalSet.of_intervals(pairs) == made
    floor = made.floor(0)
    assert floor not in seen and all(n in seen for n in range(floor))


def test_the_floor_is_the_first_sequence_not_consumed() -> None:
    cursor = Cursor("now")
    assert cursor.floor == 1
    cursor.consume(5, plan(0, 2, 3))
    assert cursor.floor == 1
    cursor.consume(9, plan(1, 1, 5))
    assert (cursor.floor, cursor.last_plan, cursor.last_sequence) == (4, 9, 5)


def test_a_cursor_survives_its_serial_form() -> None:
    cursor = Cursor("now")
    cursor.consume(7, plan(0, 1, 2, 4))
    again = Cursor.of(decode(encode(cursor.record()), CursorRecord))
    assert again.record() == cursor.record()
    assert again.floor == 3
    assert list(again.disposed["s"]) == [0, 1, 3]


def test_an_empty_ledger_begins_at_the_start_model() -> None:
    found = recover([])
    assert (found.durable, found.replay, found.number, found.last_epoch, found.last_sequence) == (None, [], 0, 0, 0)


def test_plans_after_the_last_durable_state_are_replayed_and_earlier_ones_not() -> None:
    durable = DurableRecord(epoch=1, number=1, digest="d", folder="1.1", floor=2, last_plan=2)
    records = numbered(
        RollbackRecord(old_epoch=0, new_epoch=1, fork=0),
        plan(0, 1),
        step(1, 2),
        durable,
        plan(1, 2),
        step(2, 5),
        plan(2, 3),
    )
    found = recover(records)
    assert (found.number, found.last_plan, found.last_epoch) == (1, 2, 1)
    assert [item.sequence for item in found.replay] == [5, 7]
    assert found.forks == (Fork(1, 0),)


def test_steps_after_the_fork_are_void_and_count_again_when_replayed() -> None:
    records = numbered(
        RollbackRecord(old_epoch=0, new_epoch=1, fork=0),
        plan(0, 1),
        step(1, 2),
        plan(1, 2),
        step(2, 4),
        RollbackRecord(old_epoch=1, new_epoch=2, fork=1, last_plan=2),
    )
    assert [s.plan for s in surviving_steps(records)] == [2]
    records += [Numbered(7, step(2, 4, epoch=2))]
    assert [(s.plan, s.epoch) for s in surviving_steps(records)] == [(2, 1), (4, 2)]


def test_one_lucky_batch_does_not_end_a_run() -> None:
    rule = StopRule(StopConfig(reward_above=0.9, loss_below=0.1))
    for _ in range(4):
        rule.saw(step(1, 1, reward_mean=1.0, metrics={"loss": 0.0}), 0.0)
    assert rule.met(4) is None
    rule.saw(step(1, 1, reward_mean=1.0, metrics={"loss": 1.0}), 0.0)
    assert rule.met(5) == "stop.reward_above = 0.9"


def test_the_first_condition_met_is_named() -> None:
    rule = StopRule(StopConfig(steps=3, time_s=10.0))
    assert rule.met(2) is None
    rule.saw(step(1, 1), 11.0)
    assert rule.met(2) == "stop.time_s = 10"
    assert rule.met(3) == "stop.steps = 3"
