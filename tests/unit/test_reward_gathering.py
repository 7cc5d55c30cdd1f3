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
    assert group is not None and group.compared == ["b"] and len(group.members) < group.size
    assert gathering.take("a") is None


def test_a_group_is_handed_out_when_enough_came_and_who_comes_while_it_is_compared_is_told_apart() -> None:
    gathering: Gathering[str] = Gathering(enough=2)
    assert gathering.add(task("a", 3, 5), "d") is None
    group = gathering.add(task("a", 0, 5), "a")
    assert group is not None and group.compared == ["a", "d"]
    for member, name in enumerate("bce"):  # as many as would be enough again
        assert gathering.add(task("a", 1 + member, 5), name) is None
    assert gathering.take("a") is None and not gathering.is_settled("a")
    assert gathering.settle("a") == ["b", "c", "e"]
    assert gathering.is_settled("a") and gathering.waiting == 0


def test_what_came_while_a_comparison_failed_waits_for_those_that_come_again() -> None:
    gathering: Gathering[str] = Gathering(enough=2)
    gathering.add(task("a", 0), "a")
    assert gathering.add(task("a", 1), "b") is not None
    gathering.add(task("a", 2), "c")
    assert gathering.failed("a") and not gathering.is_settled("a")
    group = gathering.add(task("a", 0), "a again")
    assert group is not None and group.compared == ["a again", "c"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=40))
def test_nothing_is_lost_or_handed_out_twice(arrivals: list[tuple[str, int]]) -> None:
    gathering: Gathering[int] = Gathering()
    out: list[int] = []
    for number, (name, member) in enumerate(arrivals):
        group = gathering.add(task(name, member), number)
        if group is not None:
            assert group.all and sorted(group.all) == sorted([*group.compared, *(one for _, one in group.doubles)])
            out += [*group.all, *gathering.settle(name)]
        elif gathering.is_settled(name):
            out += gathering.settle(name)
    for name in "abc":
        if (group := gathering.take(name)) is not None:
            out += [*group.compared, *(one for _, one in group.doubles)]
    assert sorted(out) == list(range(len(arrivals)))
