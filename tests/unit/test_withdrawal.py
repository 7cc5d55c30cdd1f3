"""Withdrawn versions: what the ledger says of them, whatever died before or after. Pure."""

from __future__ import annotations

from physarum.actors.account import Issued, Logical, close_account
from physarum.actors.trainer.aging import is_withdrawn
from physarum.actors.trainer.recovery import recover
from physarum.bus.ledger import (
    DurableRecord,
    LedgerRecord,
    Numbered,
    Planned,
    PlanRecord,
    RollbackRecord,
    StepRecord,
    WithdrawRecord,
)
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Span


class Book:
    """A ledger under construction."""

    def __init__(self) -> None:
        self.records: list[Numbered] = []
        self.epoch = 0

    def add(self, record: LedgerRecord) -> int:
        self.records.append(Numbered(len(self.records) + 1, record))
        return len(self.records)

    def takeover(self) -> None:
        """As a trainer does: it forks where the ledger says."""
        recovery = recover(self.records)
        self.add(
            RollbackRecord(
                old_epoch=self.epoch, new_epoch=self.epoch + 1, fork=recovery.number, last_plan=recovery.last_plan
            )
        )
        self.epoch += 1

    def plan(self, ordinal: int, number: int) -> int:
        one = Planned(ordinal + 1, f"t{ordinal}", "s", ordinal, 0, f"g{ordinal}", 1.0, 5, 0, [])
        return self.add(PlanRecord(epoch=self.epoch, at_number=number, executions=[one]))

    def step(self, plan: int, number: int) -> None:
        self.add(
            StepRecord(
                epoch=self.epoch, number=number, plan=plan, changed=True, trained=1, masked=0, tokens_trained=5,
                tokens_masked=0, ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0,
                finished_at=0.0,
            )
        )  # fmt: skip

    def trained(self, ordinal: int, number: int) -> int:
        plan = self.plan(ordinal, number - 1)
        self.step(plan, number)
        return plan

    def durable(self, number: int, last_plan: int) -> None:
        self.add(
            DurableRecord(
                epoch=self.epoch,
                number=number,
                digest="d",
                folder=f"{self.epoch}.{number}",
                floor=1,
                last_plan=last_plan,
            )
        )

    def withdraw(self, number: int, last_plan: int) -> None:
        self.add(WithdrawRecord(epoch=self.epoch, number=number, last_plan=last_plan, reason="bad"))

    def account(self, issued: int, present: range) -> tuple[int, dict[str, int], int]:
        """(Trained, dropped by reason, imbalance)."""
        found = close_account({"s": Issued(issued, 0)}, self.records, [], [Logical("s", one, 0) for one in present])
        return found.trained, found.dropped_by_reason, found.imbalance


def test_what_came_after_the_checkpoint_is_gone_and_the_account_closes_at_every_moment() -> None:
    book = Book()
    book.takeover()
    good = book.trained(0, 1)
    book.durable(1, good)
    later = book.trained(1, 2)
    book.durable(2, later)
    unfinished = book.plan(2, 2)  # the trainer was at it
    book.withdraw(1, good)
    assert book.account(3, range(3)) == (2, {"withdrawn": 1}, 0)
    recovery = recover(book.records)
    assert recovery.durable is not None and recovery.durable.folder == "1.1" and recovery.number == 1
    assert recovery.replay == [] and [item.sequence for item in recovery.withdrawn] == [later, unfinished]
    assert recovery.withdrawals == (Fork(1, 1),)
    book.takeover()
    assert book.account(3, range(3)) == (1, {"withdrawn": 2}, 0)
    after = book.trained(3, 2)
    assert book.account(4, range(4)) == (2, {"withdrawn": 2}, 0)
    assert [item.sequence for item in recover(book.records).replay] == [after]  # a crash before the next checkpoint
    book.takeover()
    assert book.account(4, range(4)) == (1, {"withdrawn": 2}, 0)
    book.step(after, 2)
    book.durable(2, after)
    recovery = recover(book.records)
    assert recovery.withdrawn == [] and recovery.durable is not None and recovery.durable.folder == "3.2"
    assert book.account(4, range(0)) == (2, {"withdrawn": 2}, 0)


def test_a_second_withdrawal_goes_further_back() -> None:
    book = Book()
    book.takeover()
    plans = []
    for number in (1, 2, 3):
        plans.append(book.trained(number - 1, number))
        book.durable(number, plans[-1])
    book.withdraw(2, plans[1])
    book.takeover()
    book.withdraw(1, plans[0])
    recovery = recover(book.records)
    assert recovery.number == 1 and {item.sequence for item in recovery.withdrawn} == set(plans[1:])
    book.takeover()
    assert book.account(3, range(0)) == (1, {"withdrawn": 2}, 0)


def test_tokens_of_withdrawn_versions_are_known_by_their_spans() -> None:
    def header(*versions: str) -> ExecutionHeader:
        spans = [Span(version, place, place + 1) for place, version in enumerate(versions)]
        sample = SampleHeader(
            response=len(spans), trainable=len(spans), tokens=9, spans=spans, span_trainable=[1] * len(spans),
            status="completed", reward=0.0,
        )  # fmt: skip
        return ExecutionHeader(
            execution="e", task="t", group="g", group_size=1, member=0, source="s", ordinal=0, attempt=0, tenant="", digest="",
            samples=[sample],
        )  # fmt: skip

    withdrawals = (Fork(2, 5),)
    assert not is_withdrawn(header("policy@2.5", "policy@1.3", "policy@3.9"), withdrawals)
    assert is_withdrawn(header("policy@2.5", "policy@2.6"), withdrawals)
    assert is_withdrawn(header("policy@1.6"), withdrawals) and not is_withdrawn(header("policy@2.6"), ())
