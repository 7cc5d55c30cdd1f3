"""Which tasks may be asked for again: one row for each way in which a task ends. Groups of two, `groups.refills` 1."""

from __future__ import annotations

import pytest

from physarum.actors.source.askable import Askable
from physarum.bus.ledger import Dropped, GroupClosedRecord, Numbered, Planned, PlanRecord, RefillRecord


def trained(ordinal: int, attempt: int = 0) -> PlanRecord:
    place = Planned(ordinal, _task(ordinal, attempt), "s", ordinal, attempt, f"s/0/{ordinal // 2}", 0.0, 1, 0, [])
    return PlanRecord(epoch=1, at_number=0, executions=[place])


def dropped(ordinal: int, reason: str, attempt: int = 0) -> PlanRecord:
    place = Dropped(ordinal, _task(ordinal, attempt), "s", ordinal, attempt, reason, 0.0)
    return PlanRecord(epoch=1, at_number=0, executions=[], dropped=[place])


def _task(ordinal: int, attempt: int) -> str:
    return f"s/0/{ordinal // 2}/{ordinal % 2}" + (f"+{attempt}" if attempt else "")


def refill(ordinal: int, attempt: int = 1) -> RefillRecord:
    return RefillRecord(source="s", ordinal=ordinal, group=f"s/0/{ordinal // 2}", member=ordinal % 2, attempt=attempt)


def closed(missing: list[int]) -> GroupClosedRecord:
    return GroupClosedRecord(group="s/0/0", size=2, members=[], missing=missing, trained=True)


Dead = tuple[int, int] | tuple[int, int, str]
"""Ordinal, attempt, and "final" where another attempt would end the same."""


def oldest(*events: PlanRecord | RefillRecord | GroupClosedRecord | Dead, refills: int = 1) -> int:
    made = Askable("s", refills)
    for sequence, event in enumerate(events, 1):
        if isinstance(event, tuple):
            made.dead(*event[:2], final=len(event) > 2)
        else:
            made.record(Numbered(sequence, event))
    return made.oldest


def test_nothing_is_settled_at_first_and_what_was_trained_is() -> None:
    assert oldest() == 0
    assert oldest(trained(0)) == 1
    assert oldest(trained(1)) == 0


def test_a_poison_prompt_that_died_is_settled_only_when_its_last_refill_is_dead() -> None:
    assert oldest((0, 0)) == 0
    assert oldest((0, 0), refill(0), (0, 1)) == 1
    assert oldest((0, 0), refills=0) == 1


def test_a_task_that_cannot_be_run_is_settled_at_once() -> None:
    assert oldest((0, 0, "final")) == 1


@pytest.mark.parametrize("reason", ["over_age", "hopeless"])
def test_a_drop_by_age_settles_only_the_newest_attempt(reason: str) -> None:
    assert oldest(refill(0), dropped(0, reason)) == 0
    assert oldest(refill(0), dropped(0, reason), trained(0, 1)) == 1
    assert oldest(refill(0), dropped(0, reason), dropped(0, reason, 1)) == 1
    assert oldest(refill(0), refill(0, 2), dropped(0, reason, 1), refills=2) == 0
    assert oldest(dropped(0, reason)) == 1, "a refill would have been recorded before"


@pytest.mark.parametrize(("reason", "settled"), [("duplicate", 0), ("late", 0), ("filtered", 1), ("incomplete", 1)])
def test_a_second_execution_says_nothing_about_the_first(reason: str, settled: int) -> None:
    assert oldest(dropped(0, reason)) == settled


def test_what_was_missing_when_its_group_was_closed_is_settled_with_the_group() -> None:
    assert oldest((0, 0), closed([0])) == 0
    assert oldest((0, 0), closed([0]), trained(1)) == 2


def test_records_of_other_sources_are_passed_over() -> None:
    made = Askable("s", 1)
    place = Planned(0, "t/0/0/0", "t", 0, 0, "t/0/0", 0.0, 1, 0, [])
    made.record(Numbered(1, PlanRecord(epoch=1, at_number=0, executions=[place])))
    assert made.oldest == 0
