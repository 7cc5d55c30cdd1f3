"""Members wait for their group; each is handed out once, in its own place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.reward.gathering import Gathering
from physarum.bus.records import Task


def task(group: str, member: int, size: int = 3) -> Task:
    return Task(id=f"{group}/{member}", run="r", source="s", ordinal=0, group=group, group_size=size, member=member)


def test_a_group_is_handed_out_when_its_last_member_comes_in_the_members_order() -> None:
    gathering: Gathering[str] = Gathering()
    assert gathering.add(task("a", 2), "c") is None
    assert gathering.add(task("b", 0), "other") is None
    assert gathering.add(task("a", 0), "a") is None
    group = gathering.add(task("a", 1), "b")
    assert group is not None and group.compared == ["a", "b", "c"] and list(group.doubles) == []
    assert gathering.waiting == 1


def test_a_task_that_was_executed_twice_is_compared_once() -> None:
    gathering: Gathering[str] = Gathering()
    gathering.add(task("a", 1, 2), "b")
    assert gathering.add(task("a", 1, 2), "b again") is None
    group = gathering.add(task("a", 0, 2), "a")
    assert group is not None and group.compared == ["a", "b"] and list(group.doubles) == [(1, "b again")]


def test_an_incomplete_group_is_taken_as_it_stands_and_only_once() -> None:
    gathering: Gathering[str] = Gathering()
    gathering.add(task("a", 1), "b")
    group = gathering.take("a")
    assert group is not None and group.compared == ["b"] and not group.complete
    assert gathering.take("a") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=40))
def test_nothing_is_lost_or_handed_out_twice(arrivals: list[tuple[str, int]]) -> None:
    gathering: Gathering[int] = Gathering()
    out: list[int] = []
    for number, (name, member) in enumerate(arrivals):
        group = gathering.add(task(name, member), number)
        if group is not None:
            out += [*group.compared, *(one for _, one in group.doubles)]
    for name in "abc":
        if (group := gathering.take(name)) is not None:
            out += [*group.compared, *(one for _, one in group.doubles)]
    assert sorted(out) == list(range(len(arrivals)))
