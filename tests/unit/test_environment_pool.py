"""What one worker keeps of its environments: warm ones come back when another worker was served; a drain waits for none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from physarum.agents.environments.lease import EnvironmentStartError, Place
from physarum.agents.environments.pool import EnvironmentPool
from physarum.bus.slots import Slot
from physarum.configs.environments import EnvironmentClass
from physarum.configs.hooks import Hook

pytestmark = pytest.mark.timeout(20)


class Places:
    """Slots as one worker takes them: while `free` is False others have the rest."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self.taken, self.given, self.free = 0, 0, True
        self.releasing: asyncio.Event | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> Any:
        yield self

    async def acquire(self, timeout_s: float) -> Slot:
        self.taken += 1
        return Slot(self.taken, self.taken)

    async def try_acquire(self) -> Slot | None:
        return await self.acquire(0.0) if self.free else None

    async def release(self, slot: Slot) -> None:
        if self.releasing is not None:
            await self.releasing.wait()
        self.given += 1


class Box:
    def __init__(self, closes: asyncio.Event) -> None:
        self.closes = closes

    async def close(self) -> None:
        await self.closes.wait()


def pool(places: Places, closes: asyncio.Event, fails: bool = False, **config: Any) -> EnvironmentPool:
    async def start(place: Place) -> Box:
        await asyncio.sleep(0)
        if fails:
            raise OSError("no image")
        return Box(closes)

    given = EnvironmentClass(hook=Hook("a:b"), **{"capacity": 8, "start_timeout_s": 5.0, **config})
    return EnvironmentPool("box", given, places, start)  # type: ignore[arg-type]  # what it uses of slots


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def closes() -> asyncio.Event:
    """Set: what is closed closes at once."""
    found = asyncio.Event()
    found.set()
    return found


@pytest.mark.parametrize("reuse", [False, True])
async def test_instances_are_kept_warm_again_after_another_worker_was_given_a_place(
    reuse: bool, closes: asyncio.Event
) -> None:
    places = Places()
    async with pool(places, closes, prewarm=1, reuse=reuse).open() as found:
        await settled()
        places.free = False
        async with found.lease():
            places.wanted.set()  # and nothing idles
            await settled()
        await settled()
        assert places.given == 1, "the place of the episode that ended"
        places.free = True
        async with found.lease():
            await settled()
            assert found.idle == 1, "nobody waits any more"


async def test_a_cancelled_episode_does_not_wait_until_its_instance_is_closed(closes: asyncio.Event) -> None:
    closes.clear()
    places = Places()
    async with pool(places, closes).open() as found:

        async def episode() -> None:
            async with found.lease():
                await asyncio.Event().wait()

        running = asyncio.create_task(episode())
        await settled()
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=2)
        assert running in done and running.cancelled() and not places.given, "its worker hands over what it made"
        closes.set()
    assert places.given == 1, "the worker ends after its instances"


async def test_leases_at_the_same_time_start_no_more_than_are_kept_warm(closes: asyncio.Event) -> None:
    places = Places()
    places.free = False
    async with pool(places, closes, prewarm=1).open() as found:
        await settled()
        places.free = True
        for _ in range(4):  # each lease asks for it
            found._prewarm()
        await settled()
        assert (found.idle, places.taken) == (1, 1)


async def test_a_place_is_given_back_when_the_start_failed_and_the_episode_is_cancelled_then(
    closes: asyncio.Event,
) -> None:
    places = Places()
    places.releasing = asyncio.Event()
    async with pool(places, closes, fails=True).open() as found:

        async def episode() -> None:
            with contextlib.suppress(EnvironmentStartError):
                async with found.lease():
                    pass

        running = asyncio.create_task(episode())
        await settled()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        places.releasing.set()
        await settled()
        assert places.given == 1


@pytest.mark.parametrize("where", ["close", "start"])
async def test_a_cancellation_of_its_own_costs_neither_the_place_nor_the_episode(where: str) -> None:
    """It awaited a task that it had cancelled: the place was held for ever, and the episode ended as in a drain."""

    async def awaits_what_it_cancelled() -> None:
        reader = asyncio.create_task(asyncio.sleep(1000))
        reader.cancel()
        await reader

    class Careless:
        async def close(self) -> None:
            await awaits_what_it_cancelled()

    async def start(place: Place) -> Careless:
        if where == "start":
            await awaits_what_it_cancelled()
        return Careless()

    places = Places()
    settings = EnvironmentClass(hook=Hook("a:b"), capacity=2, start_timeout_s=2.0)
    async with EnvironmentPool("box", settings, places, start).open() as found:  # type: ignore[arg-type]
        if where == "start":
            with pytest.raises(EnvironmentStartError, match="nobody had cancelled it"):
                async with found.lease():
                    pass
        else:
            async with found.lease():
                pass
    assert places.given == places.taken == 1
