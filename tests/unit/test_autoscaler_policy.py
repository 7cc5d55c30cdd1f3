"""When a group grows and shrinks: hysteresis, bounds, slow starts; and what presence says of a group's load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.autoscaler import signals
from physarum.actors.autoscaler.policy import Policy, Signal
from physarum.bus.presence import Heartbeat
from physarum.configs.autoscale import GroupScaling

GROUP = GroupScaling(least=1, most=8, up_after_s=30.0, down_after_s=300.0, step=0.25)


def beat(role: str, state: str = "ready", **numbers: float) -> Heartbeat:
    facts: dict[str, Any] = {"group": "policy"} if role == "engine" else {}
    return Heartbeat(
        role=role, instance=f"{role}-0", state=state, pid=1, host="h", started_at=0.0, sequence=1, facts=facts, numbers=numbers
    )  # fmt: skip


def played(policy: Policy, signal: Signal, size: int, times: range) -> list[int]:
    """The sizes asked for while every actor is ready at once."""
    sizes = []
    for now in times:
        size = policy.decide(signal, size, size, float(now))
        sizes.append(size)
    return sizes


def test_a_pressed_group_grows_by_a_quarter_each_half_minute_up_to_its_most() -> None:
    sizes = played(Policy(GROUP), "pressed", 4, range(200))
    assert (sizes[29], sizes[30], sizes[60], sizes[90], sizes[-1]) == (4, 5, 7, 8, 8)


def test_an_idle_group_loses_one_at_a_time_and_keeps_its_least() -> None:
    sizes = played(Policy(GROUP), "idle", 3, range(2000))
    assert (sizes[299], sizes[300], sizes[600], sizes[-1]) == (3, 2, 1, 1)


def test_a_signal_that_does_not_last_changes_nothing() -> None:
    policy = Policy(GROUP)
    for now in range(0, 1000, 20):
        assert policy.decide("pressed" if now % 40 else "fine", 4, 4, float(now)) == 4


def test_nothing_is_decided_while_the_last_change_is_still_starting() -> None:
    policy = Policy(GROUP)
    assert policy.decide("pressed", 4, 4, 0.0) == 4
    assert policy.decide("pressed", 4, 4, 30.0) == 5
    assert [policy.decide("pressed", 5, 4, float(now)) for now in range(31, 300)] == [5] * 269
    assert policy.decide("pressed", 5, 5, 310.0) == 5
    assert policy.decide("pressed", 5, 5, 341.0) == 7


@pytest.mark.parametrize(("wanted", "asked"), [(0, 1), (12, 8)])
def test_what_was_asked_for_by_hand_is_brought_within_the_bounds(wanted: int, asked: int) -> None:
    assert Policy(GROUP).decide("fine", wanted, wanted, 0.0) == asked


@given(st.lists(st.tuples(st.sampled_from(["pressed", "fine", "idle"]), st.floats(0, 400)), max_size=60))
def test_sizes_stay_within_the_bounds_and_never_turn_within_the_waits(steps: list[tuple[Signal, float]]) -> None:
    policy, size, now = Policy(GROUP), 4, 0.0
    last_change, grew = -1e9, False
    for signal, passed_s in steps:
        now += passed_s
        after = policy.decide(signal, size, size, now)
        assert GROUP.least <= after <= GROUP.most
        if after != size:
            if (after > size) != grew:
                assert now - last_change >= GROUP.up_after_s
            last_change, grew = now, after > size
        size = after


@pytest.mark.parametrize(
    ("engines", "waiting", "signal"),
    [
        ([beat("engine", kv_usage=0.9)], 0, "pressed"),
        ([beat("engine", kv_usage=0.5)], 3, "pressed"),
        ([beat("engine", kv_usage=0.5)], 0, "fine"),
        ([beat("engine", kv_usage=0.1), beat("engine", kv_usage=0.6)], 0, "idle"),
        ([beat("engine", kv_usage=0.5, waiting=2)], 0, "pressed"),
        ([beat("engine", "starting", kv_usage=0.9)], 0, "fine"),
        ([beat("engine")], 0, "fine"),
        ([], 3, "pressed"),  # a group that shrank to none would never have an engine again
        ([], 0, "fine"),
    ],
)
def test_engines_are_judged_by_their_memory_and_by_who_waits(
    engines: list[Heartbeat], waiting: float, signal: Signal
) -> None:
    assert signals.of_engines(GROUP, engines, waiting) == signal


@pytest.mark.parametrize(
    ("running", "queued", "engines", "signal"),
    [
        (32, 5, "fine", "pressed"),
        (32, 0, "fine", "fine"),
        (32, 5, "pressed", "fine"),
        (3, 0, "fine", "idle"),
        (3, 9, "fine", "fine"),
    ],
)
def test_more_rollouts_are_asked_for_only_where_they_would_help(
    running: int, queued: int, engines: Signal, signal: Signal
) -> None:
    assert signals.of_rollouts(GROUP, [beat("rollout", running=running)], 32, queued, engines) == signal


def test_a_group_without_rollouts_grows_when_tasks_wait() -> None:
    assert signals.of_rollouts(GROUP, [], 32, 5, "fine") == "pressed"
    assert signals.of_rollouts(GROUP, [], 32, 0, "fine") == "fine"
    assert signals.of_rollouts(GROUP, [beat("rollout", "starting")], 32, 5, "fine") == "fine", "one is on its way"
