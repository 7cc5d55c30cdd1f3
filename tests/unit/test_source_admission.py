"""Counting admission: hand-made ledgers with rollbacks, and the invariant that no token can become older than the bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.source.admission import Disposals, Limit, Sizes, has_room
from physarum.actors.source.clock import Clock
from physarum.bus.ledger import Dropped, Numbered, Planned, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.version import Version


def planned(ordinal: int, source: str = "main") -> Planned:
    return Planned(
        sequence=ordinal + 1, task=str(ordinal), source=source, ordinal=ordinal, attempt=0, group="g", advantage=0.0,
        trained_tokens=1, masked_tokens=0, masks=[],
    )  # fmt: skip


def dropped(ordinal: int) -> Dropped:
    return Dropped(
        sequence=ordinal + 1, task=str(ordinal), source="main", ordinal=ordinal, attempt=0, reason="duplicate"
    )


def plan(sequence: int, ordinals: Sequence[int], drops: Sequence[int] = (), epoch: int = 1) -> Numbered:
    executions = [planned(ordinal) for ordinal in ordinals]
    record = PlanRecord(
        epoch=epoch, at_number=0, executions=executions, dropped=[dropped(ordinal) for ordinal in drops]
    )
    return Numbered(sequence, record)


def step(number: int, plan_sequence: int, epoch: int = 1) -> Numbered:
    record = StepRecord(
        epoch=epoch, number=number, plan=plan_sequence, changed=True, trained=0, masked=0, tokens_trained=0,
        tokens_masked=0, ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=0.0,
    )  # fmt: skip
    return Numbered(0, record)


def rollback(new_epoch: int, last_plan: int) -> Numbered:
    return Numbered(0, RollbackRecord(old_epoch=new_epoch - 1, new_epoch=new_epoch, fork=0, last_plan=last_plan))


def fold(*records: Numbered) -> Disposals:
    disposals = Disposals("main")
    for record in records:
        disposals.record(record)
    return disposals


def test_only_executed_plans_dispose_of_tasks() -> None:
    assert fold(plan(1, [0, 1])).count == 0
    assert fold(plan(1, [0, 1], drops=[2]), step(1, 1)).count == 3


def test_a_task_is_counted_once_however_often_it_ran() -> None:
    disposals = fold(plan(1, [0, 1]), step(1, 1), plan(3, [2], drops=[0, 0, 1]), step(2, 3))
    disposals.dead(2)
    disposals.dead(2)
    assert disposals.count == 3


def test_other_sources_do_not_count() -> None:
    record = PlanRecord(epoch=1, at_number=0, executions=[planned(0), planned(1, "other"), planned(2, "eval/x")])
    assert fold(Numbered(1, record), step(1, 1)).count == 1


def test_a_rollback_voids_later_steps_and_their_replay_counts_again() -> None:
    records = [plan(1, [0, 1]), step(1, 1), plan(3, [2, 3]), step(2, 3), plan(5, [4, 5]), step(3, 5)]
    assert fold(*records).count == 6
    records.append(rollback(2, last_plan=1))
    assert fold(*records).count == 2
    records += [step(2, 3, epoch=2)]  # the recorded plan, executed again
    assert fold(*records).count == 4
    records += [rollback(3, last_plan=3), plan(9, [4, 5], epoch=3), step(3, 9, epoch=3)]
    assert fold(*records).count == 6


def test_a_second_rollback_below_the_first_voids_both_epochs() -> None:
    records = [
        plan(1, [0]),
        step(1, 1),
        plan(2, [1]),
        step(2, 2),
        rollback(2, last_plan=2),
        plan(3, [2]),
        step(3, 3, epoch=2),
    ]
    assert fold(*records).count == 3
    assert fold(*records, rollback(3, last_plan=1)).count == 1


def test_the_dead_stay_dead_over_a_rollback() -> None:
    disposals = fold(plan(1, [0, 1]), step(1, 1))
    disposals.dead(7)
    disposals.dead_unnamed()
    disposals.record(rollback(2, last_plan=0))
    assert disposals.count == 2
    disposals.record(step(1, 1, epoch=2))
    assert disposals.count == 4


LIMIT = Limit(groups=4, always=2)
"""Bound 1, batches of 2 groups."""


def test_room_is_for_whole_groups() -> None:
    # bound 1, 2 groups of 4 per batch: (1 + 1) * 2 * 4 = 16
    assert has_room(issued=12, disposed=0, sizes=Sizes(4, 4), limit=LIMIT)
    assert not has_room(issued=13, disposed=0, sizes=Sizes(4, 4), limit=LIMIT)
    assert not has_room(issued=16, disposed=3, sizes=Sizes(4, 4), limit=LIMIT)
    assert has_room(issued=16, disposed=4, sizes=Sizes(4, 4), limit=LIMIT)
    assert has_room(issued=10**9, disposed=0, sizes=Sizes(4, 4), limit=None)


def test_what_was_trained_and_is_not_served_takes_room_but_never_that_of_one_step() -> None:
    assert has_room(issued=16, disposed=8, sizes=Sizes(4, 4), limit=LIMIT, unserved=4)
    assert not has_room(issued=16, disposed=8, sizes=Sizes(4, 4), limit=LIMIT, unserved=8)
    assert has_room(issued=12, disposed=8, sizes=Sizes(4, 4), limit=LIMIT, unserved=10**6)
    on_policy = Limit(groups=2, always=0)
    assert not has_room(issued=8, disposed=8, sizes=Sizes(4, 4), limit=on_policy, unserved=8)


@pytest.mark.parametrize(
    ("served", "publish_every", "unserved"),
    [((3,), 1, 0), ((2, 3), 1, 4), ((0,), 1, 12), ((), 1, 0), ((2,), 2, 0), ((0,), 2, 8), ((9,), 1, 0)],
)
def test_only_what_is_due_to_be_served_is_unserved(served: tuple[int, ...], publish_every: int, unserved: int) -> None:
    clock = Clock()
    for number in (1, 2, 3):
        clock.record(step(number, number), 4 * number)
    assert clock.unserved([Version("policy", 1, number) for number in served], publish_every) == unserved


@given(
    bound=st.integers(0, 4),
    groups=st.integers(1, 4),
    group_size=st.integers(1, 4),
    choices=st.lists(st.integers(0, 2), max_size=120),
)
def test_a_first_in_first_out_trainer_never_sees_a_group_older_than_the_bound(
    bound: int, groups: int, group_size: int, choices: list[int]
) -> None:
    """Steps, publications and issues interleave in any order; each step takes the oldest whole batch. Age = steps since the
    weights that served at the issue. It is over the bound only where those were themselves further behind than the bound."""
    limit = Limit((bound + 1) * groups, groups if bound else 0)
    disposals, clock = Disposals("main"), Clock()
    issued = number = served = 0
    waiting: list[tuple[int, int, int]] = []
    for choice in choices:
        unserved = clock.unserved([Version("policy", 1, served)], 1)
        if choice == 1 and len(waiting) >= groups * group_size:
            batch, waiting = waiting[: groups * group_size], waiting[groups * group_size :]
            assert all(number - at <= max(bound, behind) for _, at, behind in batch)
            number += 1
            for item in (plan(number, [ordinal for ordinal, _, _ in batch]), step(number, number)):
                disposals.record(item)
                clock.record(item, disposals.count)
        elif choice == 2:
            served = min(number, served + 1)
        elif has_room(issued, disposals.count, Sizes(group_size, group_size), limit, unserved):
            waiting += [(issued + member, served, number - served) for member in range(group_size)]
            issued += group_size
        assert issued - disposals.count <= limit.groups * group_size


@given(st.data())
def test_the_count_equals_a_recount_of_the_surviving_steps(data: st.DataObject) -> None:
    """Random ledgers with rollbacks: the incremental count is the size of the union over surviving steps."""
    disposals, epoch, sequence = Disposals("main"), 1, 0
    alive: list[tuple[int, set[int]]] = []
    for _ in range(data.draw(st.integers(0, 25))):
        if data.draw(st.booleans()) or sequence == 0:
            sequence += 1
            ordinals = data.draw(st.lists(st.integers(0, 30), max_size=5))
            disposals.record(plan(sequence, ordinals, epoch=epoch))
            disposals.record(step(sequence, sequence, epoch=epoch))
            alive.append((sequence, set(ordinals)))
        else:
            epoch += 1
            last_plan = data.draw(st.integers(0, sequence))
            disposals.record(rollback(epoch, last_plan))
            alive = [entry for entry in alive if entry[0] <= last_plan]
        assert disposals.count == len(set().union(*(ordinals for _, ordinals in alive)))


@given(st.integers(0, 2), st.integers(1, 4), st.lists(st.integers(1, 6), min_size=30, max_size=30))
def test_groups_of_any_sizes_never_leave_the_trainer_without_a_batch(
    bound: int, groups: int, group_sizes: list[int]
) -> None:
    """Stages grow and shrink; whenever fewer groups are out than a batch has, the next one is let out."""
    issued = disposed = 0
    out: list[int] = []
    for size in group_sizes:
        while not has_room(
            issued, disposed, Sizes(size, max([size, *out])), Limit((bound + 1) * groups, groups if bound else 0)
        ):
            assert len(out) >= groups, f"{out} are out, a batch has {groups} groups, and one of {size} has no room"
            disposed += sum(out[:groups])
            out = out[groups:]
        issued += size
        out.append(size)
