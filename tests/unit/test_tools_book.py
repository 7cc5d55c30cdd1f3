"""Ledger views: void and provisional steps, ages after a takeover, and versions whose samples are gone."""

from __future__ import annotations

from physarum.actors.tools.book import Book
from physarum.actors.tools.samples import Use, _place
from physarum.actors.tools.steps import step_view
from physarum.actors.tools.versions import build
from physarum.bus.ledger import (
    DurableRecord,
    LedgerRecord,
    Mask,
    Numbered,
    Planned,
    PlanRecord,
    RollbackRecord,
    StepRecord,
)
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span, Version


def header(sequence: int, *spans: Span) -> ExecutionHeader:
    sample = SampleHeader(
        tokens=10, response=8, trainable=8, reward=0.5, status="completed", spans=list(spans),
        span_trainable=[span.end - span.start for span in spans],
    )  # fmt: skip
    return ExecutionHeader(
        execution=f"x{sequence}", task=f"main/0/{sequence}/0", source="main", ordinal=sequence, group="g", group_size=1,
        member=0, attempt=0, tenant="", digest="", samples=[sample],
    )  # fmt: skip


def plan(sequence: int, at_number: int, masks: list[Mask] | None = None, epoch: int = 1) -> PlanRecord:
    row = Planned(sequence, f"main/0/{sequence}/0", "main", sequence, 0, "g", 1.5, 5, 3, masks or [])
    return PlanRecord(epoch=epoch, at_number=at_number, executions=[row])


def step(plan_sequence: int, number: int, epoch: int = 1, ages: dict[int, int] | None = None) -> StepRecord:
    return StepRecord(
        epoch=epoch, number=number, plan=plan_sequence, changed=True, trained=1, masked=0, tokens_trained=8,
        tokens_masked=0, ages=ages or {}, multi_version_samples=0, reward_mean=0.5, wait_s=0.0, started_at=0.0,
        finished_at=1.0,
    )  # fmt: skip


def book(*records: LedgerRecord) -> Book:
    return Book([Numbered(sequence, record) for sequence, record in enumerate(records, start=1)])


FIRST = RollbackRecord(old_epoch=0, new_epoch=1, fork=0)
DURABLE = DurableRecord(epoch=1, number=1, digest="d", folder="1.1", floor=2, last_plan=2)


def test_a_step_that_a_takeover_resumed_before_is_void_and_its_second_execution_is_not() -> None:
    found = book(
        FIRST, plan(1, 0), step(2, 1), DURABLE, plan(2, 1), step(5, 2),
        RollbackRecord(old_epoch=1, new_epoch=2, fork=1, last_plan=2), step(5, 2, epoch=2),
    )  # fmt: skip
    assert [(one.step.epoch, one.step.number, one.void) for one in found.steps] == [
        (1, 1, False),
        (1, 2, True),
        (2, 2, False),
    ]
    assert [found.provisional(one.step) for one in found.steps] == [False, True, True]
    assert list(found.plans_under_way()) == []


def test_a_plan_whose_step_was_voided_is_under_way_again() -> None:
    found = book(
        FIRST, plan(1, 0), step(2, 1), DURABLE, plan(2, 1), step(5, 2),
        RollbackRecord(old_epoch=1, new_epoch=2, fork=1, last_plan=2),
    )  # fmt: skip
    assert [sequence for sequence, _ in found.plans_under_way()] == [5]


def test_ages_of_a_step_count_spans_that_are_not_masked() -> None:
    """Begun at number 3: tokens of 1.0 are 3 old and masked, those of 1.2 are 1 old."""
    found = book(FIRST, plan(1, 3, [Mask(0, 0, 3)]), step(2, 4))
    view = step_view(found, found.steps[0], {1: header(1, Span("policy@1.0", 0, 3), Span("policy@1.2", 3, 8))})
    [row] = view.executions
    assert (row.versions, row.ages) == ({"policy@1.0": 3, "policy@1.2": 5}, {1: 5})
    assert (row.advantage, row.reward, view.trimmed) == (1.5, 0.5, 0)


def test_an_execution_whose_sample_is_gone_keeps_what_the_plan_says() -> None:
    found = book(FIRST, plan(1, 3), step(2, 4))
    view = step_view(found, found.steps[0], {})
    [row] = view.executions
    assert (row.trained_tokens, row.masked_tokens, row.versions, row.ages) == (5, 3, None, None)
    assert view.trimmed == 1


def test_a_version_is_counted_in_headers_and_for_trimmed_samples_by_age() -> None:
    found = book(FIRST, plan(1, 2), step(2, 3, ages={2: 7}), plan(2, 3), step(4, 4, ages={3: 4}))
    view = build(found, Version("policy", 1, 0), {2: header(2, Span("policy@1.0", 0, 4))}, trimmed_through=1)
    assert [(one.number, one.tokens, one.age, one.source) for one in view.steps] == [
        (3, 7, 2, "ages"),
        (4, 4, 3, "headers"),
    ]
    assert [(one.sequence, one.tokens, one.step) for one in view.samples] == [(2, 4, 4)]


def test_a_version_that_a_takeover_withdrew_says_so() -> None:
    found = book(FIRST, plan(1, 0), step(2, 1), RollbackRecord(old_epoch=1, new_epoch=2, fork=0))
    view = build(found, Version("policy", 1, 1), {}, 0)
    assert (view.made_by, view.withdrawn, view.effective) == (2, True, 0)


def test_where_a_sample_is_follows_the_accounts_precedence() -> None:
    done = Use(step=4, epoch=1, plan=9, sequence=3, void=False, provisional=True, trained_tokens=5)
    void = Use(step=3, epoch=1, plan=7, sequence=3, void=True, provisional=True, trained_tokens=5)
    duplicate = Use(step=4, epoch=1, plan=9, sequence=5, void=False, provisional=True, dropped="duplicate")
    planned = Use(step=None, epoch=1, plan=11, sequence=3, void=False, provisional=True)
    assert _place(True, [], [void, done, duplicate], [], None)[:2] == ("trained", "step 4 (provisional)")
    assert _place(True, [], [void, duplicate], [], None)[:2] == ("in_flight", "TASKS")
    assert _place(False, [], [void, planned], [], None)[0] == "planned"
    assert _place(False, [], [], [], None)[0] == "lost"
    assert _place(False, [], [], [], "not issued yet")[0] == "not_issued"
