"""What once stopped a planner for ever, or lost a member after a takeover: lines behind the dead, drops nobody hears of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.filtering import Filters
from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.bus.ledger import GroupClosedRecord, RefillRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span
from physarum.configs.filters import FiltersConfig

SIZE = 2
REFILL = RefillRecord(source="s", ordinal=1, group="s/0/0", member=1, attempt=1)

CLOSING = GroupClosedRecord(
    group="s/0/0", size=SIZE, members=[0], missing=[1], trained=True, source="s", first_ordinal=0
)


def rules(consumption: str = "mask", groups: int = 1, bound: int = 1, refills: int = 0) -> PlanRules:
    return PlanRules(
        groups_per_batch=groups, bound=bound, normalize_std=False, objective="rl", max_sequence_tokens=100,
        groups=GroupRules(refills=refills, min_members=2), consumption=consumption,  # type: ignore[arg-type]
    )  # fmt: skip


def header(
    ordinal: int, reward: float = 0.0, attempt: int = 0, tokens: int = 10, status: Any = "completed", made_by: int = 0
) -> ExecutionHeader:
    sample = SampleHeader(
        tokens=tokens, response=4, trainable=4, reward=reward, status=status,
        spans=[Span(f"policy@1.{made_by}", 0, 4)], span_trainable=[4],
    )  # fmt: skip
    group, member = divmod(ordinal, SIZE)
    return ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{group}/{member}", source="s", ordinal=ordinal, group=f"s/0/{group}",
        group_size=SIZE, member=member, attempt=attempt, tenant="", digest="", samples=[sample],
    )  # fmt: skip


def dead(ordinal: int, attempt: int = 0) -> DeadMember:
    return DeadMember("s", ordinal, f"s/0/{ordinal // SIZE}", SIZE, ordinal % SIZE, attempt)


def admit(planner: Planner, *headers: ExecutionHeader, start: int = 1, now: float = 0.0) -> None:
    for sequence, one in enumerate(headers, start):
        planner.admit(Arrived(sequence, one), now)


def took(planner: Planner, number: int = 0) -> tuple[list[int], list[tuple[int, str]]]:
    record = planner.take(1, number, ()).record
    return [one.ordinal for one in record.executions], [(one.ordinal, one.reason) for one in record.dropped]


def filtered(*groups: Any, executions: Any = (), **more: Any) -> Filters:
    return Filters(FiltersConfig.model_validate({"groups": groups, "executions": executions, **more}))


class TestTheLineBehindADeadMember:
    """Consumption `wait`."""

    def test_a_refill_that_was_trained_lets_the_next_group_come(self) -> None:
        planner = Planner(rules("wait", refills=1))
        admit(planner, header(0))
        assert planner.bury(dead(1)) == REFILL
        planner.apply(REFILL)
        admit(planner, header(1, attempt=1), header(2), header(3), start=2)
        assert took(planner) == ([0, 1], [])
        assert planner.ready

    def test_a_member_that_was_given_up_lets_the_next_group_come(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0), header(2), header(3))
        planner.bury(dead(1))
        assert took(planner) == ([0], [])
        assert planner.ready

    def test_a_member_that_missed_its_deadline_lets_the_next_group_come(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0), header(2), header(3))
        planner.apply(GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=True))
        assert took(planner) == ([0], [])
        assert planner.ready

    def test_after_a_takeover_a_trained_refill_is_gone_like_any_other(self) -> None:
        planner = Planner(rules("wait", refills=1))
        planner.apply(REFILL)
        admit(planner, header(0), header(1, attempt=1))
        planner.take(1, 0, ())
        successor = Planner(rules("wait", refills=1), dict(planner._disposed))
        successor.apply(REFILL)
        successor.bury(dead(1))
        admit(successor, header(2), header(3), start=3)
        assert successor.ready

    def test_after_a_takeover_a_member_that_was_given_up_is_passed_when_its_letter_is_read(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0))
        planner.bury(dead(1))
        planner.take(1, 0, ())
        successor = Planner(rules("wait"), dict(planner._disposed))
        admit(successor, header(2), header(3), start=3)
        assert successor.bury(dead(1)) is None
        assert successor.ready
        assert not successor.groups.awaits("s/0/0"), "nothing of it will ever come"

    def test_after_a_takeover_a_member_that_missed_its_deadline_is_not_waited_for(self) -> None:
        planner = Planner(rules("wait"))
        admit(planner, header(0))
        planner.apply(CLOSING)
        assert took(planner) == ([0], [])
        successor = Planner(rules("wait"), dict(planner._disposed))
        admit(successor, header(2), header(3), start=3)
        assert not successor.ready
        successor.apply(CLOSING)
        assert successor.ready

    def test_a_closed_group_that_was_not_taken_keeps_its_turn_after_a_takeover(self) -> None:
        successor = Planner(rules("wait"))
        successor.apply(CLOSING)
        admit(successor, header(2), header(3), start=2)
        assert not successor.ready, "what came of it is read again"
        admit(successor, header(0), start=4)
        assert took(successor) == ([0], [])

    def test_a_letter_read_before_the_samples_does_not_pass_over_its_group(self) -> None:
        planner = Planner(rules("wait", refills=1))
        planner.apply(REFILL)
        assert planner.bury(dead(1)) is None, "its refill is on its way"
        admit(planner, header(2), header(3))
        assert not planner.ready


class TestRoomOfWhatWasDropped:
    """The source issues no group before it hears of those that left: with age.bound 0 it would wait for ever."""

    def test_one_rejected_group_of_two_with_bound_0(self) -> None:
        planner = Planner(rules(groups=2, bound=0), filters=filtered("informative"))
        admit(planner, header(0), header(1), header(2, 1.0), header(3))
        assert planner.settle(0, ()) == []
        assert (planner.ready, planner.drops_are_due) == (False, True)
        record = planner.take(1, 0, (), only_drops=True).record
        assert [one.reason for one in record.dropped] == ["filtered", "filtered"]
        assert not planner.drops_are_due

    def test_groups_whose_executions_were_all_rejected(self) -> None:
        planner = Planner(rules(groups=2), filters=filtered(executions=["completed"]))
        admit(planner, *(header(ordinal, status="truncated") for ordinal in range(4)))
        planner.settle(0, ())
        assert planner.drops_are_due

    def test_groups_that_were_too_long_incomplete_or_over_age_as_a_whole(self) -> None:
        long, open_, old = (Planner(rules("drop", groups=2)) for _ in range(3))
        admit(long, header(0, tokens=101), header(1, tokens=101), header(2), header(3))
        admit(open_, header(0), header(2), header(3))
        open_.apply(GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=False))
        admit(old, header(0), header(1), header(2, made_by=2), header(3, made_by=2))
        for planner in (long, open_, old):
            planner.settle(2 if planner is old else 0, ())
            assert (planner.ready, planner.drops_are_due) == (False, True)

    def test_a_task_that_cannot_be_run_is_not_asked_for_again(self) -> None:
        """Its prompt is too long: a refill would be so too, and the group is given up at once."""
        planner = Planner(rules(refills=1, groups=1))
        for ordinal in range(2):
            assert planner.bury(msgspec.structs.replace(dead(ordinal), final=True)) is None
        admit(planner, header(2), header(3))
        assert took(planner) == ([2, 3], [])

    def test_groups_of_dead_members_need_no_plan(self) -> None:
        """The source hears of them in DEAD."""
        planner = Planner(rules(groups=1))
        for ordinal in range(2):
            planner.bury(dead(ordinal))
        assert not planner.drops_are_due and planner.drops_due_at is None

    def test_a_late_straggler_is_recorded_soon_although_no_batch_comes(self) -> None:
        """Its task is the oldest that is out: admission `pace` lets out nothing before it left."""
        planner = Planner(rules(groups=2))
        admit(planner, header(0), header(2), header(3))
        planner.apply(GroupClosedRecord(group="s/0/0", size=SIZE, members=[0], missing=[1], trained=True))
        assert took(planner) == ([2, 3, 0], [])
        admit(planner, header(1), start=4, now=100.0)
        assert planner.drops_due_at == 101.0
        assert took(planner) == ([], [(1, "late")])
        assert planner.drops_due_at is None

    def test_an_execution_filter_that_lets_nothing_pass_ends_the_run_by_name(self) -> None:
        planner = Planner(rules(), filters=filtered(executions=["completed"], max_rejected=3))
        admit(planner, *(header(ordinal, status="truncated") for ordinal in range(6)))
        with pytest.raises(UnrecoverableError, match="filter completed rejected 4 groups one after the other"):
            admit(planner, header(6, status="truncated"), header(7, status="truncated"), start=7)

    def test_or_the_next_group_passes_and_is_counted(self) -> None:
        planner = Planner(rules(), filters=filtered(executions=["completed"], max_rejected=2, when_insufficient="keep"))
        admit(planner, *(header(ordinal, status="truncated") for ordinal in range(12)))
        planner.settle(0, ())
        assert [group.name for group in planner.groups.completed()] == ["s/0/2", "s/0/5"]
        assert planner.filters.metrics() == {"filtered/completed": 8.0, "filtered_kept": 4.0}

    def test_a_group_that_goes_on_begins_the_count_anew(self) -> None:
        planner = Planner(rules(), filters=filtered(executions=["completed"], max_rejected=1))
        for group in range(5):
            bad = (header(4 * group, status="truncated"), header(4 * group + 1, status="truncated"))
            admit(planner, *bad, header(4 * group + 2), header(4 * group + 3), start=1 + 4 * group)
        assert planner.groups.complete == 5


class TestWhatATakeoverReadsAgain:
    """A drop that was recorded before its group left was known to the successor as a member that is gone."""

    def test_a_drop_is_recorded_with_its_group_and_not_before(self) -> None:
        planner = Planner(rules())
        admit(planner, header(0, tokens=101), header(2), header(3))
        assert took(planner) == ([2, 3], [])
        successor = Planner(rules(), dict(planner._disposed))
        admit(successor, header(0, tokens=101), header(1))
        assert took(successor) == ([1], [(0, "too_long")])

    def test_a_second_copy_does_not_take_the_place_of_the_first(self) -> None:
        planner = Planner(rules())
        admit(planner, header(0), header(0), header(2), header(3))
        assert took(planner) == ([2, 3], [])
        successor = Planner(rules(), dict(planner._disposed))
        admit(successor, header(0), header(0), header(1))
        assert took(successor) == ([0, 1], [(0, "duplicate")])

    def test_a_late_original_does_not_take_the_place_of_its_refill(self) -> None:
        planner = Planner(rules(refills=1))
        planner.apply(REFILL)
        admit(planner, header(1, attempt=1), header(1), header(2), header(3))
        assert took(planner) == ([2, 3], [])
        successor = Planner(rules(refills=1), dict(planner._disposed))
        successor.apply(REFILL)
        admit(successor, header(1, attempt=1), header(1), header(0))
        assert took(successor) == ([0, 1], [(1, "late")])

    def test_a_member_that_is_retried_after_its_group_left_is_late(self) -> None:
        planner = Planner(rules())
        admit(planner, header(0))
        planner.bury(dead(1))
        planner.take(1, 0, ())
        successor = Planner(rules(), dict(planner._disposed))
        admit(successor, header(1))
        assert took(successor) == ([], [(1, "late")])

    def test_at_the_end_every_drop_is_recorded(self) -> None:
        planner = Planner(rules())
        admit(planner, header(0, tokens=101))
        assert planner.has_rest
        assert took(planner) == ([], [(0, "too_long")])
        assert not planner.has_rest
