"""An episode whose group went on without it is cut off, whether it runs or comes later; nobody else is."""

from __future__ import annotations

import asyncio

import pytest

from physarum.actors.rollout.surplus import Surplus, SurplusError
from physarum.bus.ledger import GroupClosedRecord
from physarum.bus.records import Task

pytestmark = pytest.mark.timeout(20)


def task(member: int, group: str = "s/0/0", attempt: int = 0) -> Task:
    return Task(
        id=f"{group}/{member}", run="t", source="s", ordinal=member, group=group, group_size=4, member=member,
        attempt=attempt,
    )  # fmt: skip


def closed(missing: list[int], trained: bool = True) -> GroupClosedRecord:
    members = sorted(set(range(4)) - set(missing))
    return GroupClosedRecord(group="s/0/0", size=4, members=members, missing=missing, trained=trained)


async def never() -> None:
    await asyncio.Event().wait()


async def started(surplus: Surplus, *tasks: Task) -> list[asyncio.Task[None]]:
    work = [asyncio.create_task(surplus.run(one, never)) for one in tasks]
    await asyncio.sleep(0)
    return work


def surplus() -> Surplus:
    return Surplus(None)  # type: ignore[arg-type]


async def test_only_the_missing_members_of_the_group_are_cut_off() -> None:
    made = surplus()
    work = await started(made, task(0), task(1), task(2), task(2, attempt=1), task(2, group="s/0/1"))
    made.closed(closed([1, 2]))
    done, running = await asyncio.wait(work, timeout=0.05)
    assert done == {work[1], work[2], work[3]}
    for one in done:
        with pytest.raises(SurplusError, match="group s/0/0 went on without it"):
            one.result()
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert not made._running


async def test_a_group_that_was_dropped_needs_none_of_its_members() -> None:
    made = surplus()
    (work,) = await started(made, task(0))
    made.closed(closed([1], trained=False))
    with pytest.raises(SurplusError):
        await work


async def test_a_member_that_is_handed_out_later_ends_before_it_begins() -> None:
    made = surplus()
    made.closed(closed([3]))
    with pytest.raises(SurplusError):
        await made.run(task(3), never)


async def test_a_worker_that_drains_is_not_taken_for_a_surplus() -> None:
    made = surplus()
    (work,) = await started(made, task(1))
    work.cancel()
    made.closed(closed([1]))
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("physarum.actors.rollout.surplus._REMEMBERED", 10)
    made = surplus()
    for index in range(1000):
        made.closed(GroupClosedRecord(group=f"s/0/{index}", size=2, members=[0], missing=[1], trained=True))
    assert len(made._missing) == 10
