"""An episode's clock runs while somebody works for it, and stands still while it waits for an engine."""

from __future__ import annotations

import asyncio

import pytest

from physarum.agents.budget import TokenBudget
from physarum.agents.clock import EpisodeClock

pytestmark = pytest.mark.timeout(20)


def left(clock: EpisodeClock) -> float | None:
    """When the limit is, from now; None: it stands still."""
    timeout = clock._timeout
    assert timeout is not None
    end = timeout.when()
    return None if end is None else end - asyncio.get_running_loop().time()


async def test_waiting_for_an_engine_does_not_count() -> None:
    clock = EpisodeClock()
    async with clock.limit(0.02):
        with clock.held():
            await asyncio.sleep(0.06)
        rest = left(clock)
    assert rest is not None and 0 < rest <= 0.02


async def test_working_counts_also_after_a_wait() -> None:
    clock = EpisodeClock()

    async def episode() -> None:
        async with clock.limit(0.02):
            with clock.held():
                await asyncio.sleep(0.03)
            with clock.working():
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await episode()


async def test_it_runs_as_long_as_one_of_several_requests_is_with_an_engine() -> None:
    clock = EpisodeClock()
    async with clock.limit(60.0):
        with clock.working(), clock.held(), clock.held():
            assert left(clock) is not None
        with clock.held():
            assert left(clock) is None
            with clock.working():
                assert left(clock) is not None
            assert left(clock) is None
        assert left(clock) is not None


async def test_a_limit_that_is_over_is_not_moved_by_what_ends_with_it() -> None:
    clock = EpisodeClock()

    async def episode() -> None:
        async with clock.limit(0.01):
            with clock.working():
                try:
                    await asyncio.Event().wait()
                finally:
                    with clock.held():
                        pass

    with pytest.raises(TimeoutError):
        await episode()
    with clock.held(), clock.working():
        pass  # somebody's request that outlived its episode


async def test_a_wait_that_is_cancelled_lets_it_run_on() -> None:
    clock = EpisodeClock()

    async def waits() -> None:
        with clock.held():
            await asyncio.Event().wait()

    async with clock.limit(60.0):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        assert left(clock) is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert left(clock) is not None


def test_a_budget_bounds_what_a_request_begins_with() -> None:
    budget = TokenBudget(10)
    assert budget.within({"max_new_tokens": 8, "min_new_tokens": 9}) == {"max_new_tokens": 8, "min_new_tokens": 8}
    budget.spend(7)
    assert budget.within({"max_new_tokens": 8})["max_new_tokens"] == 3
    assert not budget.is_spent
    budget.spend(5)
    assert budget.is_spent
    endless = TokenBudget(None)
    endless.spend(1 << 40)
    assert not endless.is_spent and endless.within({"max_new_tokens": 8}) == {"max_new_tokens": 8}
