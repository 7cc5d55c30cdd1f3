"""The number that tasks are pinned to in ordered mode: of the last step that counts."""

from __future__ import annotations

from physarum.actors.source.pinning import Numbers
from physarum.bus.ledger import LedgerRecord, Numbered, RollbackRecord, StepRecord


def step(plan: int, number: int, changed: bool = True) -> StepRecord:
    return StepRecord(
        epoch=1,
        number=number,
        plan=plan,
        changed=changed,
        trained=1,
        masked=0,
        tokens_trained=1,
        tokens_masked=0,
        ages={},
        multi_version_samples=0,
        reward_mean=None,
        wait_s=0.0,
        started_at=0.0,
        finished_at=0.0,
    )


def fold(*records: LedgerRecord) -> int:
    numbers = Numbers()
    for sequence, record in enumerate(records, 1):
        numbers.record(Numbered(sequence, record))
    return numbers.current


def test_before_the_first_step_it_is_the_start_model() -> None:
    assert fold() == 0
    assert fold(RollbackRecord(old_epoch=0, new_epoch=1, fork=0)) == 0


def test_a_step_that_changed_nothing_keeps_the_number() -> None:
    assert fold(step(plan=2, number=1), step(plan=4, number=1, changed=False)) == 1


def test_a_takeover_goes_back_to_its_fork_and_on_again() -> None:
    done = [step(plan=2, number=1), step(plan=4, number=2), step(plan=6, number=3)]
    back = RollbackRecord(old_epoch=1, new_epoch=2, fork=1, last_plan=2)
    assert fold(*done, back) == 1
    assert fold(*done, back, step(plan=4, number=2)) == 2
