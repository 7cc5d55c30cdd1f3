"""What a roll call tells and when: news soon, changes now and then, everybody again and again, and nothing for a few."""

from __future__ import annotations

from typing import Any

import pytest

from physarum.bus.presence import RETELL_S, TICK_S, Heartbeat, RollCall
from physarum.bus.rollcall import CROWD, LAZY_S, Teller

Calls = list[tuple[str, RollCall]]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(
    number: int, state: str = "ready", *, role: str = "rollout", started_at: float = 1.0, **facts: Any
) -> Heartbeat:
    return Heartbeat(
        role=role, instance=f"{role}-{number}", state=state, pid=1, host="h", started_at=started_at, sequence=1,
        facts=facts, numbers={"lag": 1.0},
    )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def teller(clock: Clock) -> Teller:
    """One that told of a crowd, and of it alone, a moment ago."""
    made = Teller(["rollout"], clock)
    assert names(list(made.look(crowd()))) == [f"rollout-{number}" for number in range(CROWD)]
    return made


def crowd(*changed: Heartbeat, without: tuple[int, ...] = ()) -> list[Heartbeat]:
    found = {f"rollout-{number}": beat(number) for number in range(CROWD) if number not in without}
    return list((found | {one.instance: one for one in changed}).values())


def names(calls: Calls) -> list[str]:
    return [one.instance for _, call in calls for one in call.beats]


def test_a_few_are_told_nothing_and_listen_themselves() -> None:
    assert list(Teller(["rollout"]).look([beat(number) for number in range(CROWD - 1)])) == []


def test_who_comes_goes_changes_state_or_starts_anew_is_told_at_once(teller: Teller) -> None:
    assert names(list(teller.look(crowd(beat(3, "draining"))))) == ["rollout-3"]
    assert names(list(teller.look(crowd(beat(3, "draining", started_at=2.0))))) == ["rollout-3"]
    assert names(list(teller.look(crowd(beat(3, "draining", started_at=2.0), beat(999))))) == ["rollout-999"]
    [(role, call)] = teller.look(crowd(beat(3, "draining", started_at=2.0), without=(7,)))
    assert (role, sorted(call.gone), call.beats) == ("rollout", ["rollout-7", "rollout-999"], [])


def test_changed_facts_wait_and_go_together(teller: Teller, clock: Clock) -> None:
    assert list(teller.look(crowd(beat(1, demand=5)))) == []
    clock.now += LAZY_S
    assert names(list(teller.look(crowd(beat(1, demand=6), beat(2, demand=7))))) == ["rollout-1", "rollout-2"]
    assert list(teller.look(crowd(beat(1, demand=6), beat(2, demand=7)))) == []


def test_a_tick_says_that_somebody_is_there_and_what_was_missed_is_told_again(teller: Teller, clock: Clock) -> None:
    clock.now += TICK_S
    [(_, tick)] = teller.look(crowd())
    assert tick == RollCall(open=True)
    clock.now += RETELL_S - TICK_S
    assert len(names(list(teller.look(crowd())))) == CROWD


def test_what_is_for_people_only_is_left_out(teller: Teller) -> None:
    [(_, call)] = teller.look(crowd(beat(1, "draining")))
    assert call.beats[0].numbers == {}


def test_it_ends_when_few_are_left_and_begins_whole(teller: Teller, clock: Clock) -> None:
    half = [beat(number) for number in range(CROWD // 2)]
    assert list(teller.look(half)) and teller.open, "no back and forth at the border"
    assert list(teller.look(half[1:])) == [("rollout", RollCall(open=False))]
    assert list(teller.look(half)) == []
    assert len(names(list(teller.look(crowd())))) == CROWD


def test_a_thousand_are_told_in_messages_of_a_bounded_size(clock: Clock) -> None:
    calls = list(Teller(["rollout"], clock).look([beat(number) for number in range(1000)]))
    assert [len(call.beats) for _, call in calls] == [200] * 5
