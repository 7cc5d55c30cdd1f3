"""Environments that episodes lease: never more than the capacity, whoever crashes, is cancelled, or is only thought dead."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from bus_fixture import DEADLINE_S
from test_fault_rollout import actor, issue, ordinals

from physarum.agents.environments.lease import (
    EnvironmentLostError,
    EnvironmentStartError,
    NoEnvironmentError,
    Place,
)
from physarum.agents.environments.pool import EnvironmentPool
from physarum.bus.connection import Bus
from physarum.bus.errors import NoSlotError
from physarum.bus.presence import GONE, Heartbeat, Roster, announce
from physarum.bus.process_clock import started_s
from physarum.bus.process_identity import ProcessIdentity, own
from physarum.bus.publisher import Publisher
from physarum.bus.slots import Holder, Slot, Slots
from physarum.configs.environments import EnvironmentClass
from physarum.configs.hooks import Hook

pytestmark = pytest.mark.timeout(90)

CAPACITY = 4
CLASS = "sandbox"


class Fleet:
    """Instances of the whole run: how many there are, and were at most."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.most = self.started = 0
        self.places: list[Place] = []
        self.fails = False
        self.opens: asyncio.Event | None = None

    async def start(self, place: Place) -> _Box:
        if self.opens is not None:
            await self.opens.wait()
        if self.fails:
            raise OSError("no image")
        assert place.number not in self.there, "two instances at one place"
        self.there.add(place.number)
        self.places.append(place)
        self.started += 1
        self.most = max(self.most, len(self.there))
        await asyncio.sleep(0)
        return _Box(self, place)


class _Box:
    def __init__(self, fleet: Fleet, place: Place) -> None:
        self.fleet, self.place = fleet, place

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.fleet.there.discard(self.place.number)


class World:
    """Workers on one bus, each with a presence of its own."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self.bus, self.publisher = bus, publisher
        self._beats = itertools.count(1)

    async def says(self, holder: Holder, state: str = "ready") -> None:
        beat = Heartbeat(
            role=holder.role, instance=holder.instance, state=state, pid=1, host="h", started_at=holder.started_at,
            sequence=next(self._beats),
        )  # fmt: skip
        await announce(self.bus, self.publisher, beat)

    @contextlib.asynccontextmanager
    async def slots(self, holder: Holder, capacity: int = CAPACITY) -> AsyncIterator[Slots]:
        await self.says(holder)
        found: list[Slots] = []
        roster = Roster(self.bus, holder.role, on_change=lambda: [one.notify() for one in found] and None)
        async with roster.open():
            found.append(Slots(self.bus, self.publisher, CLASS, capacity, holder, roster))
            async with found[0].open():
                yield found[0]

    @contextlib.asynccontextmanager
    async def pool(self, number: int, fleet: Fleet, **config: Any) -> AsyncIterator[EnvironmentPool]:
        given = EnvironmentClass(hook=Hook("a:b"), **{"capacity": CAPACITY, "wait_s": DEADLINE_S, **config})
        holder = Holder("rollout", f"rollout-{number}", 1.0)
        await self.says(holder)
        found: list[EnvironmentPool] = []
        roster = Roster(self.bus, "rollout", on_change=lambda: [one.slots.notify() for one in found] and None)
        async with roster.open():
            slots = Slots(self.bus, self.publisher, CLASS, given.capacity, holder, roster)
            found.append(EnvironmentPool(CLASS, given, slots, fleet.start))
            async with found[0].open():
                yield found[0]


@pytest.fixture
def world(bus: Bus, publisher: Publisher) -> World:
    return World(bus, publisher)


async def until(satisfied: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = satisfied()
            if found is True or (not isinstance(found, bool) and await found):
                return
            await asyncio.sleep(0.005)


async def crash_cycles(world: World, cycles: int) -> None:
    """Workers take what they can get and die, at any moment of it; each comes again under its name, as another process."""
    lives = random.Random(0)
    live: dict[int, Holder] = {}
    async with contextlib.AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(world.slots(Holder("rollout", "watcher", 1.0)))
        tokens = 0
        for cycle in range(cycles):
            live[cycle % 3] = holder = Holder("rollout", f"rollout-{cycle % 3}", float(cycle + 2))
            async with world.slots(holder) as slots:
                for _ in range(lives.randint(1, CAPACITY)):
                    slot = await slots.try_acquire()
                    if slot is not None:
                        assert slot.token > tokens, "tokens grow"
                        tokens = slot.token
                        if lives.random() < 0.2:
                            await slots.release(slot)
                if lives.random() < 0.1:  # in the middle of taking one
                    taking = asyncio.create_task(slots.try_acquire())
                    await asyncio.sleep(0)
                    taking.cancel()
                    await asyncio.gather(taking, return_exceptions=True)
            if cycle % 20 == 0:
                records = await watcher.records()
                assert len(records) <= CAPACITY and set(records) <= set(range(CAPACITY))
        for holder in live.values():
            await world.says(holder, GONE)
        whole = [await watcher.acquire(DEADLINE_S) for _ in range(CAPACITY)]
        assert {slot.number for slot in whole} == set(range(CAPACITY)), "nothing leaked"


async def test_a_hundred_crashes_leak_no_environment_lease(world: World) -> None:
    await crash_cycles(world, 100)


@pytest.mark.slow
async def test_a_thousand_crashes_leak_no_environment_lease(world: World) -> None:
    await crash_cycles(world, 1000)


async def test_who_waits_is_served_when_a_slot_comes_back_and_when_its_holder_is_gone(world: World) -> None:
    first, second = Holder("rollout", "rollout-0", 1.0), Holder("rollout", "rollout-1", 1.0)
    async with world.slots(first, 2) as one, world.slots(second, 2) as two:
        held = [await one.acquire(1.0), await one.acquire(1.0)]
        with pytest.raises(NoSlotError, match=r"no place of sandbox was free within 0.1 s: all 2 are held"):
            await two.acquire(0.1)
        waiting = asyncio.create_task(two.acquire(DEADLINE_S))
        await until(one.wanted.is_set)
        await one.release(held[0])
        assert (await waiting).number == held[0].number
        waiting = asyncio.create_task(two.acquire(DEADLINE_S))
        await world.says(first, GONE)
        assert (await waiting).token > held[1].token
        await asyncio.wait_for(held[1].lost.wait(), DEADLINE_S)
        assert not held[0].lost.is_set() and one.held == 0


async def test_the_slot_of_a_killed_process_of_this_machine_is_free_while_its_presence_still_stands(
    world: World,
) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    async with (
        world.slots(Holder("rollout", "rollout-0", 1.0), 1) as one,
        world.slots(Holder("rollout", "rollout-1", 1.0), 1) as two,
    ):
        one._process = ProcessIdentity(own().space, process.pid, started_s(process.pid) or 0.0)
        await one.acquire(1.0)
        assert await two.try_acquire() is None
        process.kill()
        await process.wait()
        assert await two.try_acquire() is not None


async def test_a_slot_that_was_lost_is_not_given_back_over_its_new_holder(world: World) -> None:
    first, second = Holder("rollout", "rollout-0", 1.0), Holder("rollout", "rollout-1", 1.0)
    async with world.slots(first, 1) as one, world.slots(second, 1) as two:
        held = await one.acquire(1.0)
        await world.says(first, GONE)
        taken = await two.acquire(DEADLINE_S)
        await one.release(held)
        assert [record.instance for record in (await two.records()).values()] == ["rollout-1"]
        await two.release(taken)
        assert await two.records() == {}


async def test_a_write_whose_answer_was_never_heard_is_found_again_by_its_writer(world: World) -> None:
    """The record is ours, and nothing here holds it: it would be nobody's until this process ends."""
    holder = Holder("rollout", "rollout-0", 1.0)
    async with world.slots(holder, 1) as one:
        slot = await one.acquire(1.0)
        one._held.clear()  # as after PublishTimeoutError
        again = await one.acquire(1.0)
        assert again.number == slot.number and again.token > slot.token


async def test_processes_that_take_at_the_same_time_never_hold_one_slot_twice(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        holders = [Holder("rollout", f"rollout-{number}", 1.0) for number in range(4)]
        workers = [await stack.enter_async_context(world.slots(one)) for one in holders]
        got = await asyncio.gather(*(worker.try_acquire() for worker in workers for _ in range(4)))
        slots = [slot for slot in got if isinstance(slot, Slot)]
        assert sorted({slot.number for slot in slots}) == sorted(slot.number for slot in slots)
        assert len(slots) <= CAPACITY


async def test_what_is_warm_is_there_at_once_and_is_made_good(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, prewarm=2) as pool:
        await until(lambda: pool.idle == 2)
        fleet.opens = asyncio.Event()  # nothing starts from here on, and nothing needs to
        async with asyncio.timeout(1.0), pool.lease() as leased:
            assert leased.place in fleet.places and pool.leased == 1
            fleet.opens.set()
            await until(lambda: pool.idle == 2)
        assert fleet.started == 3
    assert fleet.there == set()


async def test_an_instance_that_idles_is_closed_and_its_place_is_free(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, capacity=1, reuse=True, idle_ttl_s=0.05) as pool:
        async with pool.lease() as first:
            pass
        async with pool.lease() as second:
            assert second.instance is first.instance, "within its time it is used again"
        await until(lambda: fleet.there == set())
        await until(lambda: pool.slots.held == 0)
        async with pool.lease() as third:
            assert third.instance is not first.instance and third.place.token > first.place.token


async def test_an_episode_that_failed_leaves_no_instance_to_others(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, reuse=True) as pool:
        with contextlib.suppress(ValueError):
            async with pool.lease() as first:
                raise ValueError("no luck")
        assert fleet.there == set()
        async with pool.lease() as second:
            assert second.instance is not first.instance


async def test_without_reuse_each_episode_has_its_own(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, capacity=1) as pool:
        for _ in range(3):
            async with pool.lease():
                assert len(fleet.there) == 1
    assert fleet.started == 3


async def test_an_instance_is_handed_to_who_waits_in_the_same_worker(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, capacity=1, reuse=True) as pool:

        async def episode() -> None:
            async with pool.lease():
                await asyncio.sleep(0.001)

        await asyncio.gather(*(episode() for _ in range(20)))
    assert fleet.started == 1 and fleet.most == 1


async def test_a_worker_that_idles_gives_way_to_one_that_waits(world: World) -> None:
    fleet = Fleet()
    async with (
        world.pool(0, fleet, capacity=2, reuse=True, prewarm=2) as rich,
        world.pool(1, fleet, capacity=2, wait_s=5.0) as poor,
    ):
        await until(lambda: rich.idle == 2)
        async with poor.lease():
            assert fleet.most == 2


async def test_a_start_that_fails_hangs_or_is_cancelled_gives_its_place_back(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, capacity=1, start_timeout_s=0.05) as pool:
        fleet.fails = True
        with pytest.raises(EnvironmentStartError, match="place 0 did not start: OSError: no image"):
            await pool.lease().__aenter__()
        fleet.fails, fleet.opens = False, asyncio.Event()
        with pytest.raises(EnvironmentStartError, match=r"not within 0.05 s"):
            await pool.lease().__aenter__()
        entering = asyncio.create_task(pool.lease().__aenter__())
        await until(lambda: pool.slots.held == 1)
        entering.cancel()
        await until(lambda: pool.slots.held == 0)
        fleet.opens.set()
        async with pool.lease():
            pass


async def test_an_episode_whose_place_was_given_away_ends_by_name(world: World) -> None:
    fleet = Fleet()
    thought_gone = Holder("rollout", "rollout-0", 1.0)
    async with (
        world.pool(0, fleet, capacity=1, reuse=True) as pool,
        world.slots(Holder("rollout", "x", 1.0), 1) as other,
    ):

        async def episode() -> None:
            async with pool.lease():
                await asyncio.Event().wait()

        leasing = asyncio.create_task(episode())
        await until(lambda: pool.leased == 1)
        await world.says(thought_gone, GONE)
        await other.acquire(DEADLINE_S)
        with pytest.raises(EnvironmentLostError, match=r"place 0 of environments.sandbox"):
            await asyncio.wait_for(leasing, DEADLINE_S)
        assert fleet.there == set() and pool.idle == 0
        assert [record.instance for record in (await other.records()).values()] == ["x"]


async def test_no_time_runs_out_unnamed(world: World) -> None:
    fleet = Fleet()
    async with world.pool(0, fleet, capacity=1, wait_s=0.05) as pool, pool.lease():
        with pytest.raises(
            NoEnvironmentError, match=r"environments.sandbox: no place of sandbox was free within 0.05 s"
        ):
            await pool.lease().__aenter__()


async def test_three_workers_under_cancellations_never_have_more_than_the_capacity(world: World) -> None:
    fleet, chance = Fleet(), random.Random(1)

    async def episode(pool: EnvironmentPool) -> None:
        async with pool.lease():
            await asyncio.sleep(chance.random() * 0.004)
            if chance.random() < 0.2:
                raise ValueError("no luck")

    async with (
        world.pool(0, fleet, reuse=True, prewarm=1, idle_ttl_s=0.01) as a,
        world.pool(1, fleet, reuse=True) as b,
        world.pool(2, fleet) as c,
    ):
        tasks = [asyncio.create_task(episode(chance.choice([a, b, c]))) for _ in range(120)]
        for task in chance.sample(tasks, 40):
            await asyncio.sleep(0.003)
            task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
        odd = [one.exception() for one in tasks if not one.cancelled() and one.exception() is not None]
        assert all(isinstance(error, ValueError) for error in odd), odd
    assert fleet.most <= CAPACITY and fleet.there == set()
    async with world.slots(Holder("rollout", "last", 1.0)) as slots:
        assert await slots.records() == {}


HERE = Path(__file__)


class _Counter:
    """An instance for the episodes below."""

    async def close(self) -> None: ...


async def start_counter(place: Place, *, label: str) -> _Counter:
    """Hook `environments.CLASS.hook`."""
    assert place.name == CLASS and label == "x"
    return _Counter()


async def lease_one(task: Any, client: Any, **_args: Any) -> Any:
    """Hook `rollout.generate`: with `prompt: other` it asks for a class that is none."""
    from fault_hooks import sample

    async with client.environment("sandbok" if task.prompt == "other" else CLASS) as leased:
        assert type(leased.instance).__name__ == "_Counter"
        await asyncio.sleep(0.02)
    return [sample(task.ordinal)]


async def test_episodes_of_a_rollout_actor_lease_and_none_waits_on_its_own_clock(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Twelve episodes share one place: the last waits for longer than an episode may take. One asks for what is not there."""
    made = actor(
        tmp_path, bus, publisher, f"rollout.generate={HERE}:lease_one", f"environments.{CLASS}.hook={HERE}:start_counter",
        f"environments.{CLASS}.args.label=x", f"environments.{CLASS}.capacity=1", "rollout.slots=12",
        "rollout.episode_timeout_s=0.15", "bus.max_deliver=1",
    )  # fmt: skip
    await issue(made, ["good"] * 12 + ["other"])
    from test_fault_rollout import until as entries

    from physarum.bus.codec import decode
    from physarum.bus.work import DeadLetter

    async with running(made):
        assert sum((await ordinals(bus, 12)).values()) == 12
        (letter,) = [decode(entry.data, DeadLetter) for entry in await entries(bus, "dead", 1)]
    assert "no environments.sandbok; did you mean 'sandbox'" in letter.reason
