"""The planner: every execution that enters leaves in exactly one plan; masks follow age; groups close by death too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Plan, Planner, PlanRules
from physarum.bus.ledger import GroupClosedRecord, Mask, RefillRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Span

SIZE = 2


def rules(groups: int = 1, bound: int | None = 2, **group_rules: Any) -> PlanRules:
    return PlanRules(
        groups_per_batch=groups,
        bound=bound,
        normalize_std=False,
        objective="rl",
        max_sequence_tokens=100,
        groups=GroupRules(**group_rules),
    )


def dead(ordinal: int, attempt: int = 0) -> DeadMember:
    return DeadMember("s", ordinal, f"s/0/{ordinal // SIZE}", SIZE, ordinal % SIZE, attempt)


def header(
    ordinal: int,
    reward: float = 0.0,
    spans: list[Span] | None = None,
    tokens: int = 10,
    samples: int = 1,
    attempt: int = 0,
) -> ExecutionHeader:
    spans = [Span("policy@1.0", 0, 4)] if spans is None else spans
    sample = SampleHeader(
        tokens=tokens,
        response=4,
        trainable=4,
        reward=reward,
        status="completed",
        spans=spans,
        span_trainable=[span.end - span.start for span in spans],
    )
    group, member = divmod(ordinal, SIZE)
    return ExecutionHeader(
        execution=f"x{ordinal}",
        task=f"s/0/{group}/{member}",
        source="s",
        ordinal=ordinal,
        group=f"s/0/{group}",
        group_size=SIZE,
        member=member,
        attempt=attempt,
        tenant="",
        digest="",
        samples=[sample] * samples,
    )


def take(planner: Planner, at_number: int = 0, forks: tuple[Fork, ...] = ()) -> Plan:
    assert planner.ready
    return planner.take(1, at_number, forks)


def test_a_group_is_ready_when_its_last_member_arrives() -> None:
    planner = Planner(rules())
    planner.admit(Arrived(1, header(0, reward=1.0)))
    assert not planner.ready
    planner.admit(Arrived(2, header(1, reward=0.0)))
    plan = take(planner)
    assert [item.sequence for item in plan.record.executions] == [1, 2]
    assert [item.advantage for item in plan.record.executions] == [0.5, -0.5]
    assert plan.reward_mean == 0.5


def test_groups_are_taken_in_the_order_in_which_they_became_complete() -> None:
    planner = Planner(rules())
    for sequence, ordinal in enumerate((0, 2, 3, 1), start=1):
        planner.admit(Arrived(sequence, header(ordinal)))
    assert [item.ordinal for item in take(planner).record.executions] == [2, 3]
    assert [item.ordinal for item in take(planner).record.executions] == [0, 1]


def test_in_ordered_mode_a_batch_stands_in_the_sources_order() -> None:
    planner = Planner(msgspec.structs.replace(rules(groups=2), ordered=True))
    for sequence, ordinal in enumerate((3, 0, 2, 1), start=1):
        planner.admit(Arrived(sequence, header(ordinal)))
    assert [item.ordinal for item in take(planner).record.executions] == [0, 1, 2, 3]


def test_the_second_execution_of_a_task_is_dropped_as_duplicate_and_named() -> None:
    planner = Planner(rules())
    for sequence, ordinal in enumerate((0, 0, 1), start=1):
        planner.admit(Arrived(sequence, header(ordinal)))
    planner.admit(Arrived(4, header(1)))
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1, 3]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "duplicate"), (4, "duplicate")]


def test_an_execution_of_a_task_trained_earlier_is_a_duplicate() -> None:
    planner = Planner(rules())
    for sequence, ordinal in enumerate((0, 1), start=1):
        planner.admit(Arrived(sequence, header(ordinal)))
    take(planner)
    for sequence, ordinal in enumerate((1, 2, 3), start=3):
        planner.admit(Arrived(sequence, header(ordinal)))
    record = take(planner).record
    assert [(item.sequence, item.reason) for item in record.dropped] == [(3, "duplicate")]
    assert [item.ordinal for item in record.executions] == [2, 3]


def test_a_dead_member_does_not_hold_its_group_for_ever() -> None:
    planner = Planner(rules())
    planner.admit(Arrived(1, header(0, reward=1.0)))
    assert planner.bury(dead(1)) is None
    plan = take(planner)
    assert [(item.ordinal, item.advantage) for item in plan.record.executions] == [(0, 0.0)]


def test_a_group_whose_members_are_all_dead_makes_no_plan() -> None:
    planner = Planner(rules())
    for member in range(SIZE):
        planner.bury(dead(member))
    assert not planner.ready
    assert planner.groups.waiting == 0


def test_an_execution_that_exceeds_the_token_budget_is_dropped_and_its_group_goes_on() -> None:
    planner = Planner(rules())
    planner.admit(Arrived(1, header(0, tokens=101)))
    planner.admit(Arrived(2, header(1)))
    record = take(planner).record
    assert [(item.sequence, item.reason) for item in record.dropped] == [(1, "too_long")]
    assert [item.ordinal for item in record.executions] == [1]


@pytest.mark.parametrize(
    ("bound", "at_number", "masked"),
    [(0, 5, 4), (0, 4, 0), (1, 5, 0), (1, 6, 4), (2, 6, 0), (2, 7, 4)],
)
def test_k_admits_exactly_tokens_of_age_k(bound: int, at_number: int, masked: int) -> None:
    """K = 0 trains only the current version, K = 1 exactly one older, and so on."""
    planner = Planner(rules(bound=bound))
    for ordinal in range(SIZE):
        planner.admit(Arrived(ordinal + 1, header(ordinal, spans=[Span("policy@1.4", 0, 4)])))
    plan = take(planner, at_number)
    assert [item.masked_tokens for item in plan.record.executions] == [masked] * SIZE
    assert plan.ages == ({at_number - 4: 8} if not masked else {})
    assert (plan.trained, plan.masked) == ((2, 0) if not masked else (0, 2))


def test_only_the_tokens_over_the_bound_are_masked() -> None:
    planner = Planner(rules(bound=1))
    spans = [Span("policy@1.3", 0, 3), Span("policy@1.5", 3, 4)]
    for ordinal in range(SIZE):
        planner.admit(Arrived(ordinal + 1, header(ordinal, spans=spans)))
    plan = take(planner, at_number=5)
    assert plan.record.executions[0].masks == [Mask(0, 0, 3)]
    assert (plan.record.executions[0].trained_tokens, plan.record.executions[0].masked_tokens) == (1, 3)
    assert plan.ages == {0: 2}
    assert plan.multi_version_samples == 2


def test_a_version_of_an_abandoned_epoch_is_as_old_as_the_fork_says() -> None:
    """Weights policy@1.7 were lost by a crash that resumed at 5: at number 6 their tokens have age 1, not -1."""
    planner = Planner(rules(bound=1))
    for ordinal in range(SIZE):
        planner.admit(Arrived(ordinal + 1, header(ordinal, spans=[Span("policy@1.7", 0, 4)])))
    assert take(planner, at_number=6, forks=(Fork(2, 5),)).ages == {1: 8}


def test_fan_out_counts_an_execution_once() -> None:
    """Rewards 1, 1, 1 of one execution and 0 of the other are centred on 0.5, not on 0.75."""
    planner = Planner(rules())
    planner.admit(Arrived(1, header(0, reward=1.0, samples=3)))
    planner.admit(Arrived(2, header(1, reward=0.0)))
    assert [item.advantage for item in take(planner).record.executions] == [0.5, -0.5]


def test_a_recorded_plan_counts_the_same_as_the_plan_itself() -> None:
    planner = Planner(rules(bound=1))
    spans = [Span("policy@1.3", 0, 3), Span("policy@1.5", 3, 4)]
    headers = [header(ordinal, reward=float(ordinal), spans=spans) for ordinal in range(SIZE)]
    for ordinal, one in enumerate(headers):
        planner.admit(Arrived(ordinal + 1, one))
    plan = take(planner, at_number=5)
    assert Plan.recorded(plan.record, headers, ()) == plan


@given(
    order=st.permutations(range(12)),
    repeats=st.lists(st.integers(0, 11), max_size=6),
    deaths=st.sets(st.integers(0, 11), max_size=4),
    data=st.data(),
)
def test_every_execution_leaves_in_exactly_one_plan(
    order: list[int], repeats: list[int], deaths: set[int], data: st.DataObject
) -> None:
    """Any order, any redelivery, any deaths: nothing is lost, nothing is trained twice."""
    events = [("arrive", n) for n in order if n not in deaths] + [("arrive", n) for n in repeats if n not in deaths]
    events = data.draw(st.permutations(events + [("die", n) for n in deaths]))
    planner = Planner(rules(groups=1))
    trained: list[int] = []
    left: list[int] = []
    for sequence, (kind, ordinal) in enumerate(events, start=1):
        if kind == "die":
            planner.bury(dead(ordinal))
        else:
            planner.admit(Arrived(sequence, header(ordinal)))
        while planner.ready:
            record = take(planner).record
            trained += [item.ordinal for item in record.executions]
            left += [item.sequence for item in (*record.executions, *record.dropped)]
    assert sorted(trained) == [n for n in range(12) if n not in deaths]
    assert len(left) == len(set(left))


def test_a_dead_member_is_refilled_before_it_is_given_up() -> None:
    planner = Planner(rules(refills=1))
    planner.admit(Arrived(1, header(0)))
    refill = planner.bury(dead(1))
    assert refill == RefillRecord(source="s", ordinal=1, group="s/0/0", member=1, attempt=1)
    planner.apply(refill)
    assert planner.bury(dead(1)) is None  # the letter is read again after a restart
    assert not planner.ready
    planner.admit(Arrived(2, header(1, attempt=1)))
    assert [(item.ordinal, item.attempt) for item in take(planner).record.executions] == [(0, 0), (1, 1)]


def test_a_refill_that_dies_too_is_given_up() -> None:
    planner = Planner(rules(refills=1))
    planner.admit(Arrived(1, header(0)))
    refill = planner.bury(dead(1))
    assert refill is not None
    planner.apply(refill)
    assert planner.bury(dead(1, attempt=1)) is None
    assert [item.ordinal for item in take(planner).record.executions] == [0]


def test_the_original_of_a_refilled_member_is_late() -> None:
    planner = Planner(rules(refills=1))
    refill = planner.bury(dead(1))
    assert refill is not None
    planner.apply(refill)
    for sequence, one in enumerate((header(0), header(1, attempt=1), header(1)), start=1):
        planner.admit(Arrived(sequence, one))
    record = take(planner).record
    assert [(item.sequence, item.reason) for item in record.dropped] == [(3, "late")]


def test_an_original_that_comes_after_its_refill_was_trained_is_late() -> None:
    planner = Planner(rules(refills=1))
    refill = planner.bury(dead(1))
    assert refill is not None
    planner.apply(refill)
    planner.admit(Arrived(1, header(0)))
    planner.admit(Arrived(2, header(1, attempt=1)))
    take(planner)
    for sequence, ordinal in enumerate((1, 2, 3), start=3):
        planner.admit(Arrived(sequence, header(ordinal)))
    assert [(item.sequence, item.reason) for item in take(planner).record.dropped] == [(3, "late")]


def test_a_group_is_closed_at_its_deadline_and_a_late_member_is_dropped() -> None:
    planner = Planner(rules(deadline_s=10.0))
    planner.admit(Arrived(1, header(0)), now=100.0)
    assert planner.groups.next_deadline() == 110.0
    assert planner.groups.overdue(109.9) == []
    [closing] = planner.groups.overdue(110.0)
    assert closing == GroupClosedRecord(
        group="s/0/0", size=SIZE, members=[0], missing=[1], trained=True, source="s", first_ordinal=0
    )
    planner.apply(closing)
    assert planner.groups.next_deadline() is None
    planner.admit(Arrived(2, header(1)), now=111.0)
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "late")]


def test_a_group_with_too_few_members_at_its_deadline_is_dropped_by_name() -> None:
    planner = Planner(rules(deadline_s=10.0, min_members=2))
    planner.admit(Arrived(1, header(0)), now=0.0)
    for closing in planner.groups.overdue(10.0):
        assert not closing.trained
        planner.apply(closing)
    for sequence, ordinal in enumerate((2, 3), start=2):
        planner.admit(Arrived(sequence, header(ordinal)), now=11.0)
    record = take(planner).record
    assert [(item.sequence, item.reason) for item in record.dropped] == [(1, "incomplete")]


def test_a_closing_holds_after_a_restart_whatever_is_read_again() -> None:
    """A new planner is told of the recorded closing first, then reads the log anew: same groups, same drops."""
    closing = GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=True)
    planner = Planner(rules(deadline_s=10.0))
    planner.apply(closing)
    planner.admit(Arrived(1, header(0)), now=0.0)
    planner.admit(Arrived(2, header(1)), now=0.0)
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "late")]


def test_a_dropped_group_stays_dropped_after_a_restart() -> None:
    planner = Planner(rules(deadline_s=10.0, min_members=2))
    planner.apply(GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=False))
    for sequence, ordinal in enumerate((0, 1, 2, 3), start=1):
        planner.admit(Arrived(sequence, header(ordinal)), now=0.0)
    record = take(planner).record
    assert [(item.sequence, item.reason) for item in record.dropped] == [(1, "incomplete"), (2, "late")]
    assert [item.ordinal for item in record.executions] == [2, 3]


def test_a_group_goes_on_with_the_first_that_are_enough_and_the_rest_is_late() -> None:
    planner = Planner(rules(enough=1))
    planner.admit(Arrived(1, header(1)))
    [closing] = planner.groups.overdue(0.0)
    assert (closing.members, closing.missing, closing.trained) == ([1], [0], True)
    planner.apply(closing)
    planner.admit(Arrived(2, header(0)))
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "late")]


def compared(ordinal: int, members: tuple[int, ...], reward: float = 0.0) -> ExecutionHeader:
    return msgspec.structs.replace(header(ordinal, reward), compared=members)


def test_a_group_goes_on_with_those_that_were_compared_with_each_other() -> None:
    """Who came when the others' rewards were given has a place among nobody, whatever the group's deadline."""
    planner = Planner(rules(deadline_s=100.0))
    planner.admit(Arrived(1, compared(1, (1,))))
    [closing] = planner.groups.overdue(0.0)
    assert (closing.members, closing.missing, closing.trained) == ([1], [0], True)
    planner.apply(closing)
    planner.admit(Arrived(2, compared(0, ())))
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "late")]


def test_who_was_compared_with_nobody_is_not_trained_though_it_is_read_before_its_group_is_closed() -> None:
    planner = Planner(rules())
    planner.admit(Arrived(1, compared(1, (1,))))
    planner.admit(Arrived(2, compared(0, ())))
    assert planner.groups.overdue(0.0) == []
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(2, "uncompared")]


def test_a_group_waits_for_all_that_were_compared() -> None:
    planner = Planner(rules(enough=1))
    planner.admit(Arrived(1, compared(0, (0, 1))))
    assert planner.groups.overdue(0.0) == []
    planner.admit(Arrived(2, compared(1, (0, 1))))
    assert len(take(planner).record.executions) == 2


def test_who_was_compared_anew_after_an_owner_died_is_not_mixed_with_the_others() -> None:
    """Three of a group were compared, two were stored, then their owner died: the third was compared with nobody."""
    planner = Planner(rules())
    first, second = (msgspec.structs.replace(compared(one, (0, 1, 2)), group="g", group_size=3) for one in (0, 1))
    third = msgspec.structs.replace(compared(2, (2,)), group="g", group_size=3, member=2)
    for sequence, one in enumerate((first, second, third), start=1):
        planner.admit(Arrived(sequence, one))
    record = take(planner).record
    assert [item.sequence for item in record.executions] == [1, 2]
    assert [(item.sequence, item.reason) for item in record.dropped] == [(3, "uncompared")]


def test_a_compared_group_goes_on_without_a_member_of_it_that_was_buried() -> None:
    planner = Planner(rules(refills=1))
    planner.admit(Arrived(1, compared(0, (0, 1))))
    assert planner.bury(dead(1)) is None, "a replacement would have nobody to be compared with"
    assert [item.sequence for item in take(planner).record.executions] == [1]


def test_a_member_of_a_compared_group_that_is_over_age_is_not_asked_for_again() -> None:
    """Its replacement would have nobody to be compared with."""
    old = msgspec.structs.replace(rules(bound=0, refills=1), consumption="drop")
    planner = Planner(old)
    for sequence, ordinal in enumerate((0, 1), start=1):
        spans = [Span("policy@1.0" if ordinal else "policy@1.5", 0, 4)]
        planner.admit(Arrived(sequence, msgspec.structs.replace(header(ordinal, spans=spans), compared=(0, 1))))
    assert planner.settle(5, ()) == []
    record = planner.take(1, 5, ()).record
    assert [(item.ordinal, item.reason) for item in record.dropped] == [(1, "over_age")]
    assert [item.ordinal for item in record.executions] == [0]


def test_a_group_that_has_all_its_members_is_not_closed_for_being_enough() -> None:
    planner = Planner(rules(enough=1))
    for sequence, ordinal in enumerate((0, 1), start=1):
        planner.admit(Arrived(sequence, header(ordinal)))
    assert planner.groups.overdue(0.0) == []
    assert len(take(planner).record.executions) == 2
