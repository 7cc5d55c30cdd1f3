"""Admission `pace`: by hand, and that no step can leave a task behind that it would make too old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.source.admission import Sizes
from physarum.actors.source.clock import Clock
from physarum.actors.source.pace import Pace
from physarum.bus.ledger import Numbered, RollbackRecord, StepRecord
from physarum.bus.version import Version

LIMIT, GROUP = 8, 2  # K = 1, batches of 2 groups of 2
SIZES = Sizes(GROUP, GROUP)


def step(number: int, plan: int) -> Numbered:
    record = StepRecord(
        epoch=1, number=number, plan=plan, changed=True, trained=0, masked=0, tokens_trained=0, tokens_masked=0, ages={},
        multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=0.0,
    )  # fmt: skip
    return Numbered(0, record)


def served(*numbers: int, epoch: int = 1) -> list[Version]:
    return [Version("policy", epoch, number) for number in numbers]


def test_two_batches_are_let_out_and_then_only_what_the_oldest_allows() -> None:
    clock = Clock()
    pace = Pace(clock, 1, 2)
    for issued in range(0, LIMIT, GROUP):
        assert pace.has_room(issued, 0, 0, 0, SIZES)
        pace.note(issued + GROUP, 0)
    assert not pace.has_room(8, 0, 0, 0, SIZES)
    clock.record(step(1, 5), 4)
    assert pace.base(None) == 4
    assert not pace.has_room(8, 0, 0, 4, SIZES), "task 0 was not in that step: two more batches could go past it"
    assert pace.has_room(8, 0, 4, 4, SIZES) is False, "task 4, too, was issued before the step"
    pace.note(8, 4)
    assert pace.has_room(8, 0, 8, 4, SIZES), "nothing is out"


def test_the_clock_is_what_the_slowest_engine_serves() -> None:
    clock = Clock()
    pace = Pace(clock, 1, 2)
    clock.record(step(1, 5), 4)
    clock.record(step(2, 7), 8)
    assert pace.base(served(2, 1)) == 4
    assert pace.base(served(2)) == 8
    assert pace.base([]) == 0, "nothing serves yet"
    assert pace.has_room(8, 0, 8, 8, SIZES) and not pace.has_room(8, 0, 8, 0, SIZES)


def test_a_rollback_takes_its_steps_back_and_makes_their_weights_older() -> None:
    clock = Clock()
    pace = Pace(clock, 1, 2)
    for number, plan in ((1, 5), (2, 7), (3, 9)):
        clock.record(step(number, plan), 4 * number)
    clock.record(Numbered(0, RollbackRecord(old_epoch=1, new_epoch=2, fork=1, last_plan=5)), 4)
    assert pace.base(None) == 4
    assert pace.base(served(3)) == 4, "weights 3 of the abandoned epoch share the history up to 1"


def test_dead_tasks_count_as_never_issued() -> None:
    clock = Clock()
    pace = Pace(clock, 1, 2)
    pace.note(8, 0)
    assert not pace.has_room(8, 0, 0, 0, SIZES)
    assert pace.has_room(8, 2, 0, 0, SIZES)


def test_a_source_that_comes_after_another_assumes_the_worst() -> None:
    """Task 8 was let out when at least 8 + 1 - 8 = 1 had been trained; nobody knows whether more."""
    clock = Clock()
    pace = Pace(clock, 1, 2)
    pace.begin(16)
    clock.record(step(3, 5), 12)
    assert not pace.has_room(16, 0, 8, 12, SIZES)
    assert pace.has_room(16, 0, 16, 12, SIZES), "what the other one issued is done with"


def test_a_source_that_comes_after_another_never_leaves_less_than_a_batch_out() -> None:
    """K = 0, batches of 2 groups of 2: the other one died after the first group of the second batch. Task 4 was let out when
    at least 4 + 1 - 4 = 1 had been trained, so its clock would let nothing out, and the trainer would wait for ever."""
    clock = Clock()
    pace = Pace(clock, 0, 2)
    pace.begin(6)
    clock.record(step(1, 5), 4)
    assert pace.has_room(6, 0, 4, 4, SIZES)
    assert not pace.has_room(8, 0, 4, 4, SIZES)
    assert not pace.has_room(6, 0, 4, 0, SIZES), "nobody serves the weights after the step yet"


def test_a_batch_of_larger_groups_is_let_out() -> None:
    """K = 1, batches of 3 groups: a stage goes from 8 to 32 while one group of 8 is out. Two batches are 192 tasks."""
    pace, grown = Pace(Clock(), 1, 3), Sizes(32, 32)
    pace.note(8, 0)
    for issued in range(8, 168, 32):
        assert pace.has_room(issued, 0, 0, 0, grown), issued
    assert not pace.has_room(168, 0, 0, 0, grown)


@given(data=st.data(), bound=st.integers(0, 3), groups_per_batch=st.integers(1, 3))
def test_no_task_is_ever_trained_more_than_bound_steps_after_it_was_issued(
    data: st.DataObject, bound: int, groups_per_batch: int
) -> None:
    """Steps take any groups that are out, in any order, as soon as there is a batch: the worst a trainer can do."""
    batch = groups_per_batch * GROUP
    clock = Clock()
    pace = Pace(clock, bound, groups_per_batch)
    number = trained = issued = 0
    born: dict[int, int] = {}
    out: list[int] = []
    plan = 0
    for _ in range(60):
        if data.draw(st.booleans()):
            while pace.has_room(issued, 0, min(out, default=issued), pace.base(None), SIZES):
                born[issued] = number
                out.append(issued)
                issued += GROUP
                pace.note(issued, pace.base(None))
        elif len(out) >= groups_per_batch:
            for _ in range(groups_per_batch):
                taken = out.pop(data.draw(st.integers(0, len(out) - 1)))
                assert number - born[taken] <= bound
            trained, number, plan = trained + batch, number + 1, plan + 2
            clock.record(step(number, plan), trained)
    assert issued >= min(issued, batch)
