"""The account closes: hand-made ledgers, rollbacks, duplicates, and any order of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.account import Logical, close_account, settled
from physarum.bus.ledger import (
    Dropped,
    DurableRecord,
    LedgerRecord,
    Numbered,
    Planned,
    PlanRecord,
    RollbackRecord,
    StepRecord,
)


def logical(ordinal: int, source: str = "main") -> Logical:
    return Logical(source, ordinal, 0)


@dataclass
class Book:
    """Writes a ledger as a trainer does."""

    epoch: int = 0
    number: int = 0
    plan: int = 0
    kept: tuple[int, int] = (0, 0)
    """Number and last plan of the last durable checkpoint."""
    records: list[Numbered] = field(default_factory=list)

    def append(self, record: LedgerRecord) -> int:
        self.records.append(Numbered(len(self.records) + 1, record))
        return len(self.records)

    def take_over(self) -> None:
        fork, last_plan = self.kept
        self.append(RollbackRecord(old_epoch=self.epoch, new_epoch=self.epoch + 1, fork=fork, last_plan=last_plan))
        self.epoch, self.number, self.plan = self.epoch + 1, fork, last_plan

    def step(
        self,
        trained: Sequence[int],
        masked: Sequence[int] = (),
        dropped: Sequence[tuple[int, str]] = (),
        refused: str = "",
    ) -> None:
        self.number += 1
        rows = [planned(n, 10) for n in trained] + [planned(n, 0) for n in masked]
        lost = [Dropped(0, f"main/{n}", "main", n, 0, reason) for n, reason in dropped]
        self.plan = self.append(PlanRecord(epoch=self.epoch, at_number=self.number, executions=rows, dropped=lost))
        self.append(
            StepRecord(
                epoch=self.epoch,
                number=self.number,
                plan=self.plan,
                refused=refused,
                changed=bool(trained),
                trained=len(trained),
                masked=len(masked),
                tokens_trained=10 * len(trained),
                tokens_masked=7 * len(masked),
                ages={},
                multi_version_samples=0,
                reward_mean=None,
                wait_s=0.0,
                started_at=0.0,
                finished_at=1.0,
            )
        )

    def durable(self) -> None:
        self.kept = (self.number, self.plan)
        self.append(
            DurableRecord(epoch=self.epoch, number=self.number, digest="", folder="", floor=0, last_plan=self.plan)
        )


def planned(ordinal: int, tokens: int) -> Planned:
    return Planned(0, f"main/{ordinal}", "main", ordinal, 0, "g", 0.0, tokens, 0, [])


def test_every_execution_has_one_place() -> None:
    book = Book()
    book.take_over()
    book.step([0, 1, 2], masked=[3], dropped=[(4, "late"), (5, "too_long")])
    account = close_account({"main": 10}, book.records, dead=[logical(6)], present=[logical(n) for n in (7, 8, 9)])
    assert (account.issued, account.trained, account.masked, account.dropped, account.dead) == (10, 3, 1, 2, 1)
    assert (account.in_flight, account.imbalance, account.double_trained) == (3, 0, 0)
    assert account.dropped_by_reason == {"late": 1, "too_long": 1}
    assert (account.tokens.trained, account.tokens.masked) == (30, 7)
    assert account.closes


def test_a_lost_execution_is_an_imbalance() -> None:
    assert close_account({"main": 2}, [], dead=[], present=[logical(0)]).imbalance == 1


def test_steps_above_the_fork_are_void_and_their_executions_in_flight_again() -> None:
    book = Book()
    book.take_over()
    book.step([0, 1])
    book.durable()
    book.step([2, 3])
    book.take_over()  # the checkpoint of number 1 was resumed: step 2 of epoch 1 is void
    samples = [logical(n) for n in range(4)]
    between = close_account({"main": 4}, book.records, dead=[], present=samples)
    assert (between.trained, between.in_flight, between.imbalance, between.provisional_steps) == (2, 2, 0, 0)
    book.step([2, 3])
    after = close_account({"main": 4}, book.records, dead=[], present=samples)
    assert (after.trained, after.in_flight, after.imbalance, after.double_trained) == (4, 0, 0, 0)
    assert after.tokens.trained == 40
    assert after.provisional_steps == 1
    assert [(step.epoch, step.number) for step, _ in settled(book.records)] == [(1, 1), (2, 2)]


def test_the_executions_of_a_refused_step_are_dropped() -> None:
    book = Book()
    book.take_over()
    book.step([0, 1], dropped=[(2, "late")], refused="gradient norm is nan")
    account = close_account({"main": 3}, book.records, dead=[], present=[])
    assert account.dropped_by_reason == {"late": 1, "refused": 2}
    assert (account.trained, account.imbalance) == (0, 0)


def test_an_execution_in_two_surviving_steps_is_trained_twice() -> None:
    book = Book()
    book.take_over()
    book.step([0, 1])
    book.step([1])
    account = close_account({"main": 2}, book.records, dead=[], present=[])
    assert (account.double_trained, account.imbalance, account.closes) == (1, 0, False)


def test_the_loser_of_two_executions_of_a_task_is_a_duplicate_beside_the_sum() -> None:
    book = Book()
    book.take_over()
    book.step([0], dropped=[(0, "duplicate"), (1, "late")])
    account = close_account({"main": 2}, book.records, dead=[logical(0)], present=[logical(0), logical(1)])
    assert (account.trained, account.dropped, account.dead, account.in_flight, account.imbalance) == (1, 1, 0, 0, 0)
    assert account.duplicates == 2  # one dropped by the planner, one dead copy


def test_tasks_whose_issue_is_not_committed_yet_are_ahead_and_not_counted() -> None:
    account = close_account({"main": 1}, [], dead=[], present=[logical(0), logical(1), logical(0, "other")])
    assert (account.issued, account.in_flight, account.ahead, account.imbalance) == (1, 1, 2, 0)


def test_sources_are_counted_apart() -> None:
    account = close_account({"a": 1, "b": 2}, [], dead=[logical(0, "b")], present=[logical(0, "a"), logical(1, "b")])
    assert (account.issued, account.dead, account.in_flight, account.imbalance) == (3, 1, 2, 0)


@given(st.lists(st.sampled_from(["step", "masked", "durable", "crash", "dead", "copy"]), max_size=40), st.randoms())
def test_no_sequence_of_steps_crashes_and_deaths_opens_the_account(events: list[str], random: object) -> None:
    """A trainer that resumes at its last durable checkpoint; SAMPLES keeps everything, as it does above the floor."""
    book, issued, dead, copies = Book(), 0, [], []
    book.take_over()
    consumed: list[list[int]] = []  # by step number
    kept, waiting = 0, []
    for event in events:
        match event:
            case "step" | "masked":
                taken = waiting or [issued]
                issued += 0 if waiting else 1
                waiting = []
                consumed.append(taken)
                book.step(taken if event == "step" else [], masked=[] if event == "step" else taken)
            case "durable":
                book.durable()
                kept = len(consumed)
            case "crash":
                waiting += [one for step in consumed[kept:] for one in step]
                del consumed[kept:]
                book.take_over()
            case "dead":
                dead.append(logical(issued))
                issued += 1
            case "copy" if issued:
                copies.append(logical(random.randrange(issued)))  # type: ignore[attr-defined]
    gone = set(dead)
    present = [logical(n) for n in range(issued) if logical(n) not in gone] + copies
    account = close_account({"main": issued}, book.records, dead, present)
    assert account.closes, account
    assert account.trained + account.masked == sum(len(step) for step in consumed)
