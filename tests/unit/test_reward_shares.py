"""Each partition of the groups has one owner among the reward processes that are there, and few move when one comes or goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.reward.shares import Shares, owner_of
from physarum.bus.names import partition_of

INSTANCES = st.sets(st.integers(0, 20).map(lambda number: f"reward-{number}"), min_size=1, max_size=8)


@given(INSTANCES, st.integers(1, 64))
def test_every_partition_is_owned_once(there: set[str], count: int) -> None:
    shares = {name: Shares(name, range(count)) for name in there}
    for one in shares.values():
        one.follow(there)
    for partition in range(count):
        assert sum(one.mine[partition].is_set() for one in shares.values()) == 1
        assert all(one.mine[partition].is_set() != one.lost[partition].is_set() for one in shares.values())


@given(INSTANCES)
def test_who_leaves_moves_only_its_own(there: set[str]) -> None:
    before = {partition: owner_of(partition, there) for partition in range(64)}
    gone = min(there)
    left = there - {gone}
    if left:
        assert all(owner_of(partition, left) == one for partition, one in before.items() if one != gone)


def test_nobody_owns_anything_where_nobody_is() -> None:
    shares = Shares("reward-0", [0, 1])
    shares.follow([])
    assert not any(event.is_set() for event in shares.mine.values())
    assert all(event.is_set() for event in shares.lost.values())


def test_groups_are_spread_over_the_partitions() -> None:
    found = Counter(partition_of(f"main/0/{number}", 16) for number in range(16_000))
    assert len(found) == 16 and min(found.values()) > 800 and max(found.values()) < 1200
