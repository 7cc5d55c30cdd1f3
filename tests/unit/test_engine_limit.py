"""The limit of an engine finds what its KV holds, from far too low and far too high, for any lengths, and preempts nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing_engine import Engine, Lengths, Request, lognormal

from physarum.actors.engine.limit import Limit, LimitRules, LoadSample
from physarum.agents.fleet.fair import shares

TICK_S = 0.5
TAIL = lognormal(prompt=200, mean=2000, sigma=1.13, cap=16_000)
LONGEST = 16_200
RARE = 1e-3
"""Share of requests: one alone may hold a twelfth of this engine's KV, so that what comes together is a matter of luck."""


class Line:
    """An engine that is kept at so many requests."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self.engine, self._rng = lengths, Engine(), np.random.default_rng(0)

    def fill(self, count: int) -> None:
        for _ in range(count - self.engine.there):
            prompt, answer = self.lengths(self._rng)
            self.engine.submit(Request(prompt, prompt, answer))
        self.engine.tick(TICK_S)


def fixed(lengths: Lengths, limit: int, seconds: float) -> Engine:
    line = Line(lengths)
    for _ in range(int(seconds / TICK_S)):
        line.fill(limit)
    return line.engine


def adaptive(lengths: Lengths, seconds: float, workers: int = 1, **rules: Any) -> tuple[Engine, Limit]:
    """`workers` rollout actors, each with endless work, that hold to their shares of the limit announced a second ago."""
    line, limit = Line(lengths), Limit(LimitRules(**rules))
    names = {f"rollout-{index}": 10_000 for index in range(workers)}
    announced = limit.observe(line.engine.sample())
    for tick in range(int(seconds / TICK_S)):
        line.fill(sum(shares(names, {"policy-0": announced}, name)["policy-0"] for name in names))
        if tick % 2:
            announced = limit.observe(line.engine.sample())
    return line.engine, limit


def best_fixed(lengths: Lengths, seconds: float, limits: list[int]) -> float:
    """Tokens of the best fixed limit that preempts nothing (one that preempts is no choice: it repeats work)."""
    runs = [fixed(lengths, limit, seconds) for limit in limits]
    assert runs[-1].preempted, "the last one is beyond what fits, so the best is among them"
    return max(run.made for run in runs if not run.preempted)


@pytest.fixture(scope="module")
def best_for_the_tail() -> float:
    return best_fixed(TAIL, 3600, [40, 44, 48])


@pytest.mark.parametrize("start", [1, 100_000])
def test_a_long_tail_is_served_as_by_the_best_fixed_limit_from_far_too_low_and_far_too_high(
    start: int, best_for_the_tail: float
) -> None:
    engine, _ = adaptive(TAIL, 3600, workers=3, start=start, longest_tokens=LONGEST)
    assert engine.preempted <= RARE * engine.served
    assert engine.made >= 0.95 * best_for_the_tail


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 100_000])
@pytest.mark.parametrize(
    ("lengths", "longest", "limits"),
    [
        (lognormal(prompt=4000, mean=200, sigma=0.7, cap=1000), 5000, [16, 24, 32, 40, 48, 64]),
        (lognormal(prompt=500, mean=8000, sigma=0.8, cap=30_000), 30_500, [8, 12, 16, 20, 32]),
        (lognormal(prompt=100, mean=1000, sigma=0.0, cap=1000), 1100, [100, 200, 300, 400, 600]),
    ],
    ids=["prompts", "long answers", "equal answers"],
)
def test_other_lengths(start: int, lengths: Lengths, longest: int, limits: list[int]) -> None:
    best = best_fixed(lengths, 7200, limits)
    engine, _ = adaptive(lengths, 7200, start=start, longest_tokens=longest)
    assert engine.made >= 0.9 * best, engine.made / best
    assert engine.preempted <= RARE * engine.served


def test_short_answers_go_up_to_the_ceiling_and_answers_that_grow_bring_it_down() -> None:
    line, limit = Line(lognormal(prompt=100, mean=100, sigma=0.5, cap=400)), Limit(LimitRules(start=4, ceiling=512))
    seen = [limit.observe(line.engine.sample())]
    for tick in range(4000):
        if tick == 2000:
            line.lengths = TAIL
        line.fill(seen[-1])
        seen.append(limit.observe(line.engine.sample()) if tick % 2 else seen[-1])
    assert max(seen[:2000]) == 512
    assert 20 <= seen[-1] <= 90


samples = st.builds(
    LoadSample,
    at=st.floats(0, 100),
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    used_tokens=st.integers(0, 120_000),
    capacity_tokens=st.none() | st.just(100_000),
    made_tokens=st.none() | st.floats(0, 1e6),
    prefilled_tokens=st.none() | st.integers(0, 1_000_000),
    waiting_tokens=st.none() | st.integers(0, 1_000_000),
    retracted=st.integers(0, 3),
)


@given(st.lists(samples, max_size=20), st.integers(1, 9), st.integers(10, 100), st.none() | st.integers(1, 1000))
@settings(max_examples=50)
def test_whatever_is_reported_the_limit_stays_within_its_bounds(
    reports: list[LoadSample], floor: int, ceiling: int, start: int | None
) -> None:
    limit = Limit(LimitRules(floor=floor, ceiling=ceiling, start=start, longest_tokens=5000))
    for report in reports:
        assert floor <= limit.observe(report) <= ceiling


FULL = LoadSample(at=0.0, running=100, waiting=0, used_tokens=98_000, capacity_tokens=100_000)


def at(second: float, **changes: Any) -> LoadSample:
    return msgspec.structs.replace(FULL, at=second, **({"made_tokens": 100.0 * second} | changes))


def test_one_congestion_costs_one_decrease() -> None:
    limit = Limit(LimitRules(start=100, decrease=0.5))
    found = [limit.observe(at(second)) for second in range(5)]
    assert found == [100, 50, 50, 50, 50], "its requests take long to end"
    assert limit.observe(at(5, running=50)) == 25, "reached, and still too full"
    assert "KV usage 0.98" in limit.reason


def test_waiting_and_preemption_are_congestion_too() -> None:
    queued = Limit(LimitRules(start=100, queue_target_s=2.0))
    calm = {"used_tokens": 10_000, "made_tokens": 0.0}
    assert queued.observe(at(0, **calm)) == 100
    assert [queued.observe(at(second, waiting=3, **calm)) for second in (1, 2, 3)] == [100, 100, 85]
    preempted = Limit(LimitRules(start=100))
    preempted.observe(at(0, **calm))
    assert preempted.observe(at(1, retracted=1, **calm)) == 85


def test_a_queue_that_is_prefilled_soon_is_none() -> None:
    limit = Limit(LimitRules(start=100, queue_target_s=2.0))
    for second in range(20):
        report = at(second, used_tokens=10_000, waiting=5, waiting_tokens=500, prefilled_tokens=10_000 * second)
        assert limit.observe(report) >= 100
    assert limit.queue_s < 0.2


def test_somebody_who_always_waits_for_a_moment_is_no_queue_where_prefilled_tokens_are_not_reported() -> None:
    """SGLang 0.5.15 at 80 short requests a second: each sample found the one or two that had just come."""
    limit = Limit(LimitRules(start=256, ceiling=256, queue_target_s=2.0))
    for second in range(60):
        report = at(second, running=254, waiting=2, used_tokens=52_000, capacity_tokens=400_000,
                    made_tokens=22_000.0 * second, waiting_tokens=128)  # fmt: skip
        assert limit.observe(report) == 256
    assert limit.queue_s < 0.1


def test_a_queue_of_requests_that_takes_long_to_be_served_is_one() -> None:
    limit = Limit(LimitRules(start=256, ceiling=256, queue_target_s=2.0))
    found = [
        limit.observe(at(second, running=16, waiting=240, used_tokens=32_000, made_tokens=800.0 * second))
        for second in range(5)
    ]
    assert found[-1] < 256 and "240 requests wait" in limit.reason


def test_nothing_is_let_in_on_what_cannot_be_known_yet() -> None:
    """An empty engine begins with what fits whatever the requests do, however high the start."""
    limit = Limit(LimitRules(start=1000, longest_tokens=10_000))
    assert limit.observe(at(0, running=0, used_tokens=0)) == 8


def test_what_others_found_is_begun_with() -> None:
    limit = Limit(LimitRules(longest_tokens=10_000, ceiling=60), found=42.5)
    assert limit.observe(at(0, running=0, used_tokens=0)) == 42
    assert Limit(LimitRules(ceiling=30), found=42.5).value == 30


def test_a_limit_that_nobody_needs_does_not_grow() -> None:
    limit = Limit(LimitRules(start=100))
    for second in range(50):
        limit.observe(at(second, running=20, used_tokens=10_000))
    assert limit.value == 100


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    limit = Limit(LimitRules(start=50))
    limit.observe(at(1000, used_tokens=1000, running=50))
    assert limit.observe(at(1001, used_tokens=0, running=0, made_tokens=0.0)) == 50
