"""Retried dead letters in the account: where their execution went, and dead again only when it is nowhere."""

from __future__ import annotations

from physarum.actors.account import Logical, close_account
from physarum.bus.ledger import Dropped, Numbered, Planned, PlanRecord, RollbackRecord, StepRecord


def logical(ordinal: int) -> Logical:
    return Logical("main", ordinal, 0)


def ledger_of(trained: list[int], dropped: list[int] = ()) -> list[Numbered]:  # type: ignore[assignment]
    """One step that trained some executions and dropped others as late."""
    rows = [Planned(0, f"main/{n}", "main", n, 0, "g", 0.0, 5, 0, []) for n in trained]
    lost = [Dropped(0, f"main/{n}", "main", n, 0, "late") for n in dropped]
    step = StepRecord(
        epoch=1, number=1, plan=2, changed=True, trained=len(rows), masked=0, tokens_trained=5 * len(rows), tokens_masked=0,
        ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
    )  # fmt: skip
    records = [
        RollbackRecord(old_epoch=0, new_epoch=1, fork=0),
        PlanRecord(epoch=1, at_number=0, executions=rows, dropped=lost),
        step,
    ]
    return [Numbered(sequence, record) for sequence, record in enumerate(records, start=1)]


def test_a_retried_letter_is_in_flight_while_its_task_is_queued() -> None:
    account = close_account({"main": 1}, [], dead=[], present=[logical(0)], retried=[logical(0)])
    assert (account.dead, account.in_flight, account.imbalance) == (0, 1, 0)


def test_a_letter_that_is_dead_and_not_retried_stays_dead_though_a_copy_is_queued() -> None:
    account = close_account({"main": 1}, [], dead=[logical(0)], present=[logical(0)])
    assert (account.dead, account.in_flight, account.imbalance) == (1, 0, 0)


def test_a_retried_letter_that_was_trained_is_trained() -> None:
    account = close_account({"main": 2}, ledger_of([0, 1]), dead=[], present=[], retried=[logical(1)])
    assert (account.trained, account.dead, account.duplicates, account.imbalance) == (2, 0, 0, 0)


def test_a_retried_letter_that_came_too_late_is_dropped() -> None:
    account = close_account({"main": 2}, ledger_of([0], dropped=[1]), dead=[], present=[], retried=[logical(1)])
    assert (account.dropped_by_reason, account.dead, account.imbalance) == ({"late": 1}, 0, 0)


def test_a_retried_letter_that_is_found_nowhere_is_dead_again() -> None:
    """The mark comes before the message: a crash between the two must not lose the execution from the account."""
    account = close_account({"main": 1}, [], dead=[], present=[], retried=[logical(0)])
    assert (account.dead, account.in_flight, account.imbalance) == (1, 0, 0)


def test_a_retried_execution_that_dies_again_is_dead() -> None:
    account = close_account({"main": 1}, [], dead=[logical(0)], present=[], retried=[logical(0)])
    assert (account.dead, account.imbalance) == (1, 0)
