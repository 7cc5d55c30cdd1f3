"""What becomes of tokens over the age bound, policy by policy, by hand; and that none of them ever has gradient."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.aging import AgeRules
from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Plan, Planner, PlanRules
from physarum.bus.ledger import GroupClosedRecord, Mask, PlanRecord, RefillRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Span, Version, age

SIZE = 2


def rules(consumption: str = "drop", bound: int = 1, groups: int = 1, refills: int = 1, **more: Any) -> PlanRules:
    return PlanRules(
        groups_per_batch=groups,
        bound=bound,
        normalize_std=False,
        objective="grpo",
        max_sequence_tokens=100,
        groups=GroupRules(refills=refills),
        consumption=consumption,  # type: ignore[arg-type]
        **more,
    )


def header(
    ordinal: int,
    *numbers: int,
    attempt: int = 0,
    source: str = "s",
    tokens: int = 10,
    cut_off: bool = False,
    epoch: int = 1,
) -> ExecutionHeader:
    """One token of each weight number given; `cut_off`: given up in flight, without a token."""
    spans = [Span(f"policy@{epoch}.{number}", at, at + 1) for at, number in enumerate(numbers)]
    sample = SampleHeader(
        tokens=tokens,
        response=len(numbers),
        trainable=len(numbers),
        reward=float(ordinal % SIZE),
        status="aborted" if cut_off else "completed",
        spans=spans,
        span_trainable=[1] * len(numbers),
    )
    group, member = divmod(ordinal, SIZE)
    task = f"{source}/0/{group}/{member}" + (f"+{attempt}" if attempt else "")
    return ExecutionHeader(
        execution=f"{task}:x", task=task, source=source, ordinal=ordinal, group=f"{source}/0/{group}", group_size=SIZE,
        member=member, attempt=attempt, tenant="", digest="", samples=[sample],
    )  # fmt: skip


def admit(planner: Planner, *headers: ExecutionHeader, start: int = 1) -> None:
    for sequence, one in enumerate(headers, start):
        planner.admit(Arrived(sequence, one))


def ordinals(record: PlanRecord) -> list[tuple[int, int]]:
    return [(item.ordinal, item.attempt) for item in record.executions]


def drops(record: PlanRecord) -> list[tuple[int, int, str]]:
    return [(item.ordinal, item.attempt, item.reason) for item in record.dropped]


REFILL = RefillRecord(source="s", ordinal=0, group="s/0/0", member=0, attempt=1, reason="over_age")


def test_drop_asks_for_the_execution_again_and_its_group_stays_whole() -> None:
    """At number 5 with K = 1 a token of weights 3 is over: member 0 goes, and comes again as attempt 1."""
    planner = Planner(rules())
    admit(planner, header(0, 3, 5), header(1, 4, 5))
    assert planner.settle(5, ()) == [REFILL]
    planner.apply(REFILL)
    assert not planner.ready
    planner.admit(Arrived(3, header(0, 5, attempt=1)))
    assert planner.settle(5, ()) == []
    record = planner.take(1, 5, ()).record
    assert ordinals(record) == [(0, 1), (1, 0)]
    assert drops(record) == [(0, 0, "over_age")]


def test_drop_without_refills_goes_on_with_those_that_are_left() -> None:
    planner = Planner(rules(refills=0))
    admit(planner, header(0, 3), header(1, 4))
    assert planner.settle(5, ()) == []
    record = planner.take(1, 5, ()).record
    assert (ordinals(record), drops(record)) == ([(1, 0)], [(0, 0, "over_age")])


def test_a_group_that_is_too_old_as_a_whole_leaves_as_drops() -> None:
    planner = Planner(rules(refills=0))
    admit(planner, header(0, 3), header(1, 3))
    assert planner.settle(5, ()) == []
    assert not planner.ready and planner.has_rest
    record = planner.take(1, 5, ()).record
    assert (ordinals(record), drops(record)) == ([], [(0, 0, "over_age"), (1, 0, "over_age")])


def test_a_drop_is_in_no_plan_before_its_refill_is_recorded() -> None:
    """A crash between the two would lose the member: nobody would ask for it again."""
    planner = Planner(rules(aborts=True))
    admit(planner, header(0, cut_off=True), header(2, 5), header(3, 5), start=1)
    assert planner.ready and planner.asks
    assert drops(planner.take(1, 5, ()).record) == []
    assert planner.settle(6, ()) == [msgspec.structs.replace(REFILL, reason="hopeless")]
    assert drops(planner.take(1, 6, ()).record) == [(0, 0, "hopeless")]


def test_the_original_stays_dropped_after_a_takeover_at_lower_weights() -> None:
    """At number 3, after a crash, weights 3 would be young again: but its refill is on its way, and only one may count."""
    planner = Planner(rules())
    planner.apply(REFILL)
    admit(planner, header(0, 3), header(1, 3), header(0, 3, attempt=1))
    assert planner.settle(3, ()) == []
    record = planner.take(2, 3, ()).record
    assert (ordinals(record), drops(record)) == ([(0, 1), (1, 0)], [(0, 0, "over_age")])


def test_a_refill_that_dies_after_an_age_drop_is_given_up() -> None:
    planner = Planner(rules())
    admit(planner, header(0, 3), header(1, 5))
    for refill in planner.settle(5, ()):
        planner.apply(refill)
    planner.admit(Arrived(3, header(2, 5)))
    planner.admit(Arrived(4, header(3, 5)))
    planner.take(1, 5, ())  # records the drop
    assert planner.bury(DeadMember("s", 0, "s/0/0", SIZE, 0, 1)) is None
    assert ordinals(planner.take(1, 6, ()).record) == [(1, 0)]


def test_a_second_copy_of_a_dropped_execution_is_a_duplicate() -> None:
    planner = Planner(rules(refills=0))
    admit(planner, header(0, 3), header(1, 5))
    planner.settle(5, ())
    planner.take(1, 5, ())
    admit(planner, header(0, 3), header(2, 5), header(3, 5), start=3)
    assert drops(planner.take(1, 5, ()).record) == [(0, 0, "duplicate")]


def test_what_becomes_too_old_in_a_last_batch_is_dropped_there() -> None:
    """Nothing more comes: no refill is asked for, and still nothing over the bound has gradient."""
    planner = Planner(rules(groups=2))
    admit(planner, header(0, 3, 5), header(1, 5))
    record = planner.take(1, 5, ()).record
    assert (ordinals(record), drops(record)) == ([(1, 0)], [(0, 0, "over_age")])


def test_what_a_worker_gave_up_is_hopeless_and_asked_for_again() -> None:
    planner = Planner(rules(aborts=True))
    admit(planner, header(0, cut_off=True), header(1, 5))
    asked = planner.settle(5, ())
    assert asked == [msgspec.structs.replace(REFILL, reason="hopeless")]
    planner.apply(asked[0])
    planner.admit(Arrived(3, header(0, 5, attempt=1)))
    record = planner.take(1, 5, ()).record
    assert (ordinals(record), drops(record)) == ([(0, 1), (1, 0)], [(0, 0, "hopeless")])


def test_where_nothing_is_cut_off_an_empty_sample_is_trained_as_before() -> None:
    planner = Planner(rules("mask"))
    admit(planner, header(0, cut_off=True), header(1, 5))
    record = planner.take(1, 5, ()).record
    assert (ordinals(record), drops(record)) == ([(0, 0), (1, 0)], [])


def test_train_trains_what_is_over_and_counts_it() -> None:
    planner = Planner(rules("train"))
    admit(planner, header(0, 2, 3, 5), header(1, 4))
    plan = planner.take(1, 5, ())
    assert plan.ages == {3: 1, 2: 1, 0: 1, 1: 1}
    assert plan.over_age == 2
    assert all(not item.masks for item in plan.record.executions)


def test_a_recorded_plan_counts_what_is_over_as_the_plan_itself_does() -> None:
    made, headers = rules("train"), [header(0, 2, 3, 5), header(1, 4)]
    planner = Planner(made)
    admit(planner, *headers)
    plan = planner.take(1, 5, ())
    assert Plan.recorded(plan.record, headers, (), made) == plan


def test_streams_have_their_own_bound_and_policy() -> None:
    """Stream `s` drops at K = 1, stream `fresh` masks at K = 0, stream `old` trains everything."""
    own = {"fresh": AgeRules(bound=0), "old": AgeRules(bound=0, consumption="train")}
    planner = Planner(rules(groups=3, refills=0, streams=own))
    for source in ("s", "fresh", "old"):
        admit(planner, header(0, 3, 5, source=source), header(1, 4, 5, source=source))
    assert planner.settle(5, ()) == []
    plan = planner.take(1, 5, ())
    masks = {(item.task, item.trained_tokens): item.masks for item in plan.record.executions}
    assert masks == {
        ("s/0/0/1", 2): [],
        ("fresh/0/0/0", 1): [Mask(0, 0, 1)],
        ("fresh/0/0/1", 1): [Mask(0, 0, 1)],
        ("old/0/0/0", 2): [],
        ("old/0/0/1", 2): [],
    }
    assert plan.over_age == 2


class TestWait:
    """Batches in the order of admission."""

    def test_a_later_group_is_not_taken_before_an_earlier_one(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(2, 0), header(3, 0), header(0, 0))
        assert planner.groups.complete == 1 and not planner.ready
        planner.admit(Arrived(4, header(1, 0)))
        assert planner.ready
        assert ordinals(planner.take(1, 0, ()).record) == [(0, 0), (1, 0)]
        assert ordinals(planner.take(1, 1, ()).record) == [(2, 0), (3, 0)]

    def test_a_group_of_dead_members_is_not_waited_for(self) -> None:
        planner = Planner(rules("wait", refills=0))
        admit(planner, header(2, 0), header(3, 0))
        for ordinal in (0, 1):
            assert not planner.ready
            planner.bury(DeadMember("s", ordinal, "s/0/0", SIZE, ordinal, 0))
        assert planner.ready

    def test_a_group_that_was_dropped_as_incomplete_is_not_waited_for(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0, 0), header(2, 0), header(3, 0))
        assert not planner.ready
        planner.apply(GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=False))
        assert planner.ready

    def test_a_refill_is_waited_for(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0, 0), header(2, 0), header(3, 0))
        refill = planner.bury(DeadMember("s", 1, "s/0/0", SIZE, 1, 0))
        assert refill is not None
        planner.apply(refill)
        assert not planner.ready
        planner.admit(Arrived(4, header(1, 0, attempt=1)))
        assert ordinals(planner.take(1, 0, ()).record) == [(0, 0), (1, 1)]

    def test_the_order_goes_on_after_a_takeover(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, *(header(ordinal, 0) for ordinal in range(4)))
        planner.take(1, 0, ())
        successor = Planner(rules("wait"), dict(planner._disposed))
        admit(successor, header(4, 0), header(5, 0), start=5)
        assert not successor.ready, "group 1 was complete, and is read again"
        admit(successor, header(2, 0), header(3, 0), start=3)
        assert ordinals(successor.take(2, 1, ()).record) == [(2, 0), (3, 0)]

    def test_at_the_end_of_the_data_nothing_is_waited_for(self) -> None:
        planner = Planner(rules("wait", groups=4))
        admit(planner, header(4, 0), header(5, 0), header(2, 0), header(3, 0))
        assert ordinals(planner.take(1, 0, ()).record) == [(2, 0), (3, 0), (4, 0), (5, 0)]

    def test_with_counting_admission_and_weights_served_at_once_nothing_is_ever_masked(self) -> None:
        """Group g is let out by step g - K - 1 at the earliest and trained by step g: made by weights g - K or newer."""
        bound = 2
        planner = Planner(rules("wait", bound=bound))
        for group in range(20):
            made_by = max(0, group - bound)
            admit(planner, *(header(SIZE * group + member, made_by) for member in range(SIZE)), start=1 + SIZE * group)
            plan = planner.take(1, group, ())
            assert all(not item.masks for item in plan.record.executions)


@pytest.mark.parametrize("consumption", ["mask", "drop", "wait"])
@given(data=st.data())
def test_no_token_with_gradient_is_older_than_the_bound(consumption: str, data: st.DataObject) -> None:
    """Any arrivals, deaths, takeovers and steps in any order; ages by the definition, from the headers themselves."""
    bound = data.draw(st.integers(0, 2))
    planner = Planner(rules(consumption, bound, groups=data.draw(st.integers(1, 2)), aborts=consumption == "drop"))
    number, forks, epoch = 3, (), 1
    headers: dict[int, ExecutionHeader] = {}
    left: list[int] = []
    waiting = [(ordinal, 0) for ordinal in range(10)]
    for sequence in range(1, 25):
        event = data.draw(st.sampled_from(["come", "come", "come", "step", "crash"]))
        if event == "come" and waiting:
            ordinal, attempt = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            made_by = sorted(data.draw(st.lists(st.integers(max(0, number - 4), number), max_size=3)))
            cut_off = consumption == "drop" and not made_by
            one = header(ordinal, *made_by, attempt=attempt, cut_off=cut_off, epoch=data.draw(st.integers(1, epoch)))
            headers[sequence] = one
            planner.admit(Arrived(sequence, one))
        elif event == "crash":
            epoch, number = epoch + 1, max(0, number - data.draw(st.integers(0, 2)))
            forks += (Fork(epoch, number),)
        for refill in planner.settle(number, forks):
            planner.apply(refill)
            waiting.append((refill.ordinal, refill.attempt))
        if event == "step" and (planner.ready or planner.has_rest):
            record = planner.take(epoch, number, forks).record
            left += [place.sequence for place in record.places]
            for item in record.executions:
                _check_ages(headers[item.sequence], item.masks, number, forks, bound)
            number += any(item.trained_tokens for item in record.executions)
    while planner.has_rest:
        left += [place.sequence for place in planner.take(epoch, number, forks).record.places]
    assert len(left) == len(set(left)), "nothing leaves twice"


def _check_ages(one: ExecutionHeader, masks: list[Mask], number: int, forks: tuple[Fork, ...], bound: int) -> None:
    masked = {(mask.start, mask.end) for mask in masks}
    for span in one.samples[0].spans:
        if (span.start, span.end) not in masked:
            assert age(Version.parse(span.version), number, forks) <= bound
