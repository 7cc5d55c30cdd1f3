"""Busy time is a union of intervals: overlapping requests are not counted twice, and a pop loses nothing."""

from __future__ import annotations

from contextlib import ExitStack

from physarum.agents.meter import BusyMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlap_is_merged_and_gaps_are_kept() -> None:
    clock = Clock()
    meter = BusyMeter(clock)
    with ExitStack() as first:
        first.enter_context(meter.busy())  # 100 .. 103
        clock.now = 101.0
        with meter.busy():  # 101 .. 102, inside the first
            clock.now = 102.0
        clock.now = 103.0
    clock.now = 110.0
    with meter.busy():  # 110 .. 111
        clock.now = 111.0
    assert meter.pop() == [(100.0, 103.0), (110.0, 111.0)]
    assert meter.pop() == []


def test_a_pop_cuts_what_is_still_open_and_the_rest_comes_later() -> None:
    clock = Clock()
    meter = BusyMeter(clock)
    with meter.busy():
        clock.now = 104.0
        assert meter.in_flight == 1
        assert meter.pop() == [(100.0, 104.0)]
        clock.now = 106.0
    assert meter.pop() == [(104.0, 106.0)]
    assert meter.in_flight == 0


def test_a_clock_set_back_gives_no_negative_interval() -> None:
    clock = Clock()
    meter = BusyMeter(clock)
    with meter.busy():
        clock.now = 90.0
    assert meter.pop() == []
