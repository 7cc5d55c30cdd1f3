"""The end of a small data set, retried members, and the stop conditions that count samples and epochs."""

from __future__ import annotations

import pytest

from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.actors.trainer.stopping import StopRule
from physarum.bus.ledger import StepRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.configs.stop import StopConfig

SIZE = 2


def planner(groups: int = 2, *, min_members: int = 1) -> Planner:
    rules = PlanRules(
        groups_per_batch=groups, bound=2, normalize_std=False, objective="rl", max_sequence_tokens=100,
        groups=GroupRules(min_members=min_members),
    )  # fmt: skip
    return Planner(rules)


def arrived(ordinal: int, tokens: int = 10, reward: float = 0.0) -> Arrived:
    group, member = divmod(ordinal, SIZE)
    sample = SampleHeader(
        tokens=tokens, response=4, trainable=4, reward=reward, status="completed", spans=[], span_trainable=[]
    )
    header = ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{group}/{member}", source="s", ordinal=ordinal, group=f"s/0/{group}",
        group_size=SIZE, member=member, attempt=0, tenant="", digest="", samples=[sample],
    )  # fmt: skip
    return Arrived(ordinal + 1, header)


def dead(ordinal: int) -> DeadMember:
    group, member = divmod(ordinal, SIZE)
    return DeadMember("s", ordinal, f"s/0/{group}", SIZE, member, 0)


def test_what_is_left_of_the_last_batch_is_a_smaller_one() -> None:
    made = planner(groups=2)
    for ordinal in (0, 1):
        made.admit(arrived(ordinal))
    assert (made.ready, made.has_rest) == (False, True)
    assert [one.ordinal for one in made.take(1, 0, ()).record.executions] == [0, 1]
    assert not made.has_rest


def test_open_groups_are_closed_by_their_rules_when_nothing_more_comes() -> None:
    for min_members, executions, dropped in ((1, [0], []), (2, [], ["incomplete"])):
        made = planner(min_members=min_members)
        made.admit(arrived(0))
        [closing] = made.groups.rest()
        assert (closing.members, closing.missing) == ([0], [1])
        made.apply(closing)
        record = made.take(1, 0, ()).record
        assert [one.ordinal for one in record.executions] == executions
        assert [one.reason for one in record.dropped] == dropped


def test_drops_that_no_plan_has_recorded_are_a_last_plan_of_their_own() -> None:
    made = planner()
    made.admit(arrived(0, tokens=101))
    made.admit(arrived(1, tokens=101))
    assert made.has_rest
    record = made.take(1, 0, ()).record
    assert (record.executions, [one.reason for one in record.dropped]) == ([], ["too_long", "too_long"])


def test_a_group_whose_members_all_died_trains_when_they_are_retried() -> None:
    made = planner(groups=1)
    for ordinal in (0, 1):
        made.bury(dead(ordinal))
    for ordinal in (0, 1):
        made.revive(dead(ordinal))
    for ordinal in (0, 1):
        made.admit(arrived(ordinal))
    assert [one.ordinal for one in made.take(1, 0, ()).record.executions] == [0, 1]


def test_an_open_group_waits_for_a_retried_member_again() -> None:
    made = planner(groups=1)
    made.bury(dead(1))
    made.revive(dead(1))
    made.admit(arrived(0))
    assert not made.ready
    made.admit(arrived(1))
    assert [one.ordinal for one in made.take(1, 0, ()).record.executions] == [0, 1]


def test_a_retried_member_of_a_group_that_went_on_without_it_is_late() -> None:
    made = planner(groups=1)
    made.admit(arrived(0))
    made.bury(dead(1))
    made.take(1, 0, ())
    made.revive(dead(1))
    made.admit(arrived(1))
    assert not made.ready
    assert [one.reason for one in made.take(1, 1, ()).record.dropped] == ["late"]


def step(trained: int) -> StepRecord:
    return StepRecord(
        epoch=1, number=1, plan=1, changed=True, trained=trained, masked=0, tokens_trained=0, tokens_masked=0, ages={},
        multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("before", [0, 6])
def test_samples_trained_before_a_restart_count(before: int) -> None:
    rule = StopRule(StopConfig(samples=10), before)
    rule.saw(step(3), 0.0)
    assert rule.met(1) is None
    rule.saw(step(7 - before), 0.0)
    assert rule.met(2) == "stop.samples = 10"
