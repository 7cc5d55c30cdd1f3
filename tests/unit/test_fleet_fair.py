"""Shares of the engines: nobody decides for all, and yet no engine gets more than it takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.fleet.fair import allotments, announced, shares

names = st.sampled_from([f"rollout-{index}" for index in range(8)])
demands = st.dictionaries(names, st.integers(0, 300), min_size=1)
limits = st.dictionaries(st.sampled_from([f"policy-{index}" for index in range(6)]), st.integers(1, 200), min_size=1)


@given(demands, st.integers(0, 1000))
def test_nobody_has_less_than_it_asks_for_while_another_has_more(wants: dict[str, int], capacity: int) -> None:
    granted = allotments(wants, capacity)
    assert abs(sum(granted.values()) - capacity) < 1e-6
    level = max(granted.values())
    spare = sum(wants.values()) <= capacity
    for name, value in granted.items():
        if spare:
            assert value >= wants[name] - 1e-6
        else:
            assert value <= wants[name] + 1e-6
            assert value >= min(wants[name], level) - 1e-6


@given(demands, limits)
def test_the_shares_of_an_engine_sum_to_its_limit_and_none_is_negative(
    wants: dict[str, int], sizes: dict[str, int]
) -> None:
    each = {name: shares(wants, sizes, name) for name in wants}
    for engine, limit in sizes.items():
        assert all(found[engine] >= 0 for found in each.values())
        assert sum(found[engine] for found in each.values()) == limit
    granted = allotments(wants, sum(sizes.values()))
    for name, found in each.items():
        assert sum(found.values()) > granted[name] - 1 - 1e-6


@given(st.integers(1, 8), limits)
def test_equals_have_equal_shares_of_every_engine(count: int, sizes: dict[str, int]) -> None:
    wants = {f"rollout-{index}": 100_000 for index in range(count)}
    for engine, limit in sizes.items():
        found = [shares(wants, sizes, name)[engine] for name in wants]
        assert max(found) - min(found) <= 2, (engine, limit, found)


def test_a_worker_alone_may_have_everything() -> None:
    assert shares({"a": 0}, {"x": 7, "y": 3}, "a") == {"x": 7, "y": 3}


def test_idle_workers_leave_their_places_to_busy_ones() -> None:
    wants = {"busy": 1000, "idle": 2}
    assert shares(wants, {"x": 50, "y": 50}, "busy") == {"x": 49, "y": 49}


@given(st.integers(0, 10_000), st.lists(st.integers(0, 10_000), max_size=20))
def test_what_is_announced_is_enough_and_little_more(first: int, later: list[int]) -> None:
    said = announced(0, first)
    for demand in later:
        said = announced(said, demand)
        assert demand <= said <= demand * 8 / 7


def test_a_little_less_is_no_news() -> None:
    assert [announced(64, demand) for demand in (64, 60, 56, 55, 65)] == [64, 64, 64, 55, 65]
