"""Many listeners, one teller: rosters give up listening to everybody while it tells, and are right whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from bus_fixture import DEADLINE_S
from test_bus_presence import beat, until

from physarum.actors.janitor import herald
from physarum.actors.janitor.herald import Herald
from physarum.bus import presence, rollcall
from physarum.bus.connection import Bus
from physarum.bus.presence import GONE, Roster, announce
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are a crowd, and nobody waits long."""
    monkeypatch.setattr(rollcall, "CROWD", 4)
    monkeypatch.setattr(presence, "EXPIRY_S", 1)
    monkeypatch.setattr(presence, "RETELL_S", 0.5)
    monkeypatch.setattr(rollcall, "RETELL_S", 0.5)
    for module in (presence, rollcall, herald):
        monkeypatch.setattr(module, "TICK_S", 0.3)


@contextlib.asynccontextmanager
async def told(bus: Bus) -> AsyncIterator[asyncio.Task[None]]:
    teller = Herald(bus)
    async with Roster(bus, on_change=teller.heard).open() as roster:
        task = asyncio.create_task(teller.run(roster))
        try:
            yield task
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def beating(bus: Bus, publisher: Publisher, *instances: str) -> AsyncIterator[None]:
    """They say that they are there, until the block ends."""

    async def beats() -> None:
        for sequence in range(1, 1000):
            for name in instances:
                await announce(bus, publisher, beat(name, sequence))
            await asyncio.sleep(0.2)

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        task.cancel()


async def direct(roster: Roster, expected: bool) -> None:
    """Waits until the roster listens to everybody itself, or no longer does."""
    async with asyncio.timeout(DEADLINE_S):
        while roster.listens is not expected:
            await asyncio.sleep(0.02)


async def test_a_roster_hears_of_everybody_from_one_teller(bus: Bus, publisher: Publisher) -> None:
    async with AsyncExitStack() as stack:
        roster = await stack.enter_async_context(Roster(bus, "engine").open())
        crowd = AsyncExitStack()
        await crowd.enter_async_context(beating(bus, publisher, "e-0", "e-1", "e-2", "e-3"))
        await stack.enter_async_context(told(bus))
        await until(roster, "e-0", "e-1", "e-2", "e-3")
        await direct(roster, False)
        await announce(bus, publisher, beat("e-4", 1, "starting"))
        await until(roster, "e-0", "e-1", "e-2", "e-3", "e-4")
        await announce(bus, publisher, beat("e-4", 2, GONE))
        await until(roster, "e-0", "e-1", "e-2", "e-3")
        newcomer = await stack.enter_async_context(Roster(bus, "engine").open())
        assert len(newcomer.members) == 4
        await crowd.aclose()
        await until(roster)
        await direct(roster, True)


@pytest.mark.slow
async def test_without_a_teller_what_is_stored_is_read(bus: Bus, publisher: Publisher) -> None:
    async with (
        Roster(bus, "engine").open() as roster,
        beating(bus, publisher, "e-0", "e-1", "e-2", "e-3"),
        told(bus) as teller,
    ):
        await direct(roster, False)
        teller.cancel()
        async with beating(bus, publisher, "e-4"):
            await until(roster, "e-0", "e-1", "e-2", "e-3", "e-4")
        async with told(bus):
            await until(roster, "e-0", "e-1", "e-2", "e-3")
            assert not roster.listens


async def test_one_role_alone_is_told_to_its_listeners(bus: Bus, publisher: Publisher) -> None:
    changes: list[int] = []
    async with (
        Roster(bus, "rollout", on_change=lambda: changes.append(1)).open() as roster,
        beating(bus, publisher, "e-0", "e-1", "e-2", "e-3"),
        told(bus),
    ):
        await direct(roster, False)
        assert (roster.members, changes) == ([], [])
