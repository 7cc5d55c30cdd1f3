"""A version is tried by as many canaries as there are places before others take it; one refusal keeps it from all of them."""

from __future__ import annotations

import asyncio

import pytest
from bus_fixture import DEADLINE_S

from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.version import Fork
from physarum.weightsync.canary import Canary, Trial
from physarum.weightsync.errors import StaleVersionError, VersionRefusedError

pytestmark = pytest.mark.timeout(60)
KEY = ("canary", "policy", "group")
FIRST, SECOND = "policy@1.1", "policy@1.2"


def canary(bus: Bus, publisher: Publisher, me: str, places: int = 1, limit_s: float = 60.0) -> Canary:
    return Canary(Register(bus, publisher, "weights", Trial), KEY, me, places, limit_s)


@pytest.mark.parametrize("places", [1, 3])
async def test_others_load_it_only_after_every_canary_let_it_pass(bus: Bus, publisher: Publisher, places: int) -> None:
    tried: list[str] = []
    loaded: list[str] = []

    async def engine(me: str) -> None:
        mine = canary(bus, publisher, me, places)
        if await mine.admitted(FIRST):
            tried.append(me)
            await asyncio.sleep(0)
            assert not loaded
            await mine.vote(FIRST, None)
        else:
            loaded.append(me)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(engine(f"policy-{number}") for number in range(6)))
    assert len(tried) == places and len(loaded) == 6 - places
    trial = await canary(bus, publisher, "any").current()
    assert trial is not None and (trial.verdict, trial.passed, trial.takers) == ("passed", FIRST, {})


async def test_one_refusal_refuses_it_for_all_and_the_next_is_tried_anew(bus: Bus, publisher: Publisher) -> None:
    one, two, other = (canary(bus, publisher, name, places=2) for name in ("one", "two", "other"))
    async with asyncio.timeout(DEADLINE_S):
        for mine in (one, two):
            assert await mine.admitted(FIRST)
            await mine.vote(FIRST, None)
        assert await one.admitted(SECOND) and await two.admitted(SECOND)
        waiting = asyncio.create_task(other.admitted(SECOND))
        await one.vote(SECOND, "worse than before")
        with pytest.raises(VersionRefusedError, match=f"{SECOND} was refused by its canary, one: worse than before"):
            await waiting
        await two.vote(SECOND, None)  # too late: one refusal is enough
        trial = await other.current()
        assert trial is not None and (trial.verdict, trial.passed) == ("refused", FIRST)
        assert await other.admitted("policy@1.3")
        with pytest.raises(StaleVersionError, match=r"policy@1\.3 is on trial"):
            await one.admitted(SECOND)


async def test_a_canary_that_dies_is_followed_by_who_waits(bus: Bus, publisher: Publisher) -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await canary(bus, publisher, "dead", limit_s=0.5).admitted(FIRST)
        assert await canary(bus, publisher, "next").admitted(FIRST)


async def test_one_that_comes_back_is_canary_still(bus: Bus, publisher: Publisher) -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await canary(bus, publisher, "same").admitted(FIRST)
        assert await canary(bus, publisher, "same").admitted(FIRST)


async def test_a_canary_that_cannot_load_keeps_nobody_waiting(bus: Bus, publisher: Publisher) -> None:
    broken, other = canary(bus, publisher, "broken"), canary(bus, publisher, "other")
    async with asyncio.timeout(DEADLINE_S):
        assert await broken.admitted(FIRST)
        waiting = asyncio.create_task(other.admitted(FIRST))
        await broken.leave(FIRST)
        assert await waiting
        await broken.leave(FIRST)  # it has no place any more: the other's stays
        trial = await other.current()
        assert trial is not None and set(trial.takers) == {"other"}


async def test_one_that_comes_back_again_and_again_is_not_canary_for_ever(bus: Bus, publisher: Publisher) -> None:
    same = canary(bus, publisher, "same", limit_s=60.0)
    async with asyncio.timeout(DEADLINE_S):
        await same.admitted(FIRST)
        before = await same.current()
        await same.admitted(FIRST)
        assert await same.current() == before, "its time does not begin anew"


async def test_who_comes_late_loads_what_passed_while_the_next_is_on_trial(bus: Bus, publisher: Publisher) -> None:
    one, late = canary(bus, publisher, "one"), canary(bus, publisher, "late")
    async with asyncio.timeout(DEADLINE_S):
        assert await one.admitted(FIRST)
        await one.vote(FIRST, None)
        assert await one.admitted(SECOND)
        assert not await late.admitted(FIRST)


async def test_a_run_that_goes_on_with_fewer_canaries_ends_its_trial(bus: Bus, publisher: Publisher) -> None:
    before = canary(bus, publisher, "one", places=2)
    async with asyncio.timeout(DEADLINE_S):
        assert await before.admitted(FIRST)
        await before.vote(FIRST, None)
        now = canary(bus, publisher, "one", places=1)
        assert await now.admitted(FIRST)
        await now.vote(FIRST, None)
        assert not await canary(bus, publisher, "two", places=1).admitted(FIRST)


async def test_what_was_withdrawn_since_is_nothing_to_go_back_to(bus: Bus, publisher: Publisher) -> None:
    """Neither for who reads the trial, nor in the next one; what holds stays."""
    one, two = canary(bus, publisher, "one"), canary(bus, publisher, "two")
    async with asyncio.timeout(DEADLINE_S):
        assert await one.admitted(SECOND)
        await one.vote(SECOND, None)
        two.withdrawn = (Fork(1, 2),)
        held = await two.current()
        assert held is not None and held.passed == SECOND
        two.withdrawn = (Fork(1, 1),)
        gone = await two.current()
        assert gone is not None and gone.passed is None
        assert await two.admitted("policy@2.1")
        stored = await one.current()  # which has not heard of it
        assert stored is not None and (stored.label, stored.passed) == ("policy@2.1", None)


async def test_a_refusal_after_the_verdict_changes_nothing(bus: Bus, publisher: Publisher) -> None:
    slow, next_one = canary(bus, publisher, "slow", limit_s=0.1), canary(bus, publisher, "next")
    async with asyncio.timeout(DEADLINE_S):
        assert await slow.admitted(FIRST)
        assert await next_one.admitted(FIRST)
        await next_one.vote(FIRST, None)
        await slow.vote(FIRST, "too slow")
        trial = await slow.current()
        assert trial is not None and (trial.verdict, trial.passed) == ("passed", FIRST)
