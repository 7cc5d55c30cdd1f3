"""Engines of a group are updated a few at a time; one that dies in its turn holds nobody up for longer than an update."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from bus_fixture import DEADLINE_S

from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.weightsync.turns import Turn, Turns

pytestmark = pytest.mark.timeout(60)
KEY = ("turn", "policy", "group")


def turns(bus: Bus, publisher: Publisher, me: str, at_once: int, limit_s: float = 60.0) -> Turns:
    return Turns(Register(bus, publisher, "weights", Turn), KEY, me, at_once, limit_s)


@pytest.mark.parametrize(("engines", "at_once"), [(8, 2), (5, 1)])
async def test_never_more_than_the_share_stands_still_and_all_come_to_their_turn(
    bus: Bus, publisher: Publisher, engines: int, at_once: int
) -> None:
    inside, most, numbers = set[str](), 0, count()

    async def update(me: str) -> None:
        nonlocal most
        for _ in range(3):
            async with turns(bus, publisher, me, at_once).take():
                inside.add(me)
                most = max(most, len(inside))
                for _ in range(next(numbers) % 5):
                    await asyncio.sleep(0)
                inside.discard(me)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(update(f"policy-{number}") for number in range(engines)))
    assert 1 <= most <= at_once
    left = (await Register(bus, publisher, "weights", Turn).get(*KEY)).value
    assert left is not None and left.holders == {}


async def test_an_engine_that_dies_in_its_turn_is_passed_over(bus: Bus, publisher: Publisher) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await turns(bus, publisher, "dead", 1, limit_s=0.5)._acquire()
        async with turns(bus, publisher, "next", 1).take():
            pass


async def test_one_that_comes_back_after_its_death_has_its_turn_still(bus: Bus, publisher: Publisher) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await turns(bus, publisher, "same", 1)._acquire()
        async with turns(bus, publisher, "same", 1).take():
            pass


async def test_without_a_limit_nothing_is_asked(bus: Bus, publisher: Publisher) -> None:
    async with turns(bus, publisher, "alone", 0).take():
        pass
    assert (await Register(bus, publisher, "weights", Turn).get(*KEY)).revision == 0
