"""An episode in flight is cut off once its first token is over the bound, and never before."""

from __future__ import annotations

import asyncio

import pytest

from physarum.actors.rollout.in_flight import HopelessError, Watched


async def never() -> None:
    await asyncio.Event().wait()


async def started(watched: Watched) -> asyncio.Task[None]:
    work = asyncio.create_task(watched.run(never()))
    await asyncio.sleep(0)
    return work


async def test_it_goes_on_at_the_bound_and_ends_beyond_it() -> None:
    watched = Watched(bound=2)
    work = await started(watched)
    watched.first = 3
    watched.look(head=5)
    await asyncio.sleep(0)
    assert not work.done()
    watched.look(head=6)
    with pytest.raises(HopelessError, match="made by weights 3, the bound is 2"):
        await work


async def test_without_a_token_nothing_is_lost() -> None:
    watched = Watched(bound=0)
    work = await started(watched)
    watched.look(head=100)
    await asyncio.sleep(0)
    assert not work.done()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_an_episode_that_is_done_stays_done() -> None:
    watched = Watched(bound=0)

    async def answer() -> int:
        return 7

    assert await watched.run(answer()) == 7
    watched.first = 0
    watched.look(head=9)
    assert not watched.is_cut


async def test_a_worker_that_drains_is_not_taken_for_a_hopeless_episode() -> None:
    """The task must go back to TASKS, not into SAMPLES."""
    watched = Watched(bound=0)
    work = await started(watched)
    watched.first = 0
    work.cancel()
    watched.look(head=5)
    with pytest.raises(asyncio.CancelledError):
        await work
