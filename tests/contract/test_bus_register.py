"""Registers: one winner per compare-and-set, watchers hear of every change, values expire when told to."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from bus_fixture import DEADLINE_S, Connect, OwnServer

from physarum.bus.connection import Bus
from physarum.bus.errors import WrongSequenceError
from physarum.bus.publisher import Publisher
from physarum.bus.register import Entry, Register

pytestmark = pytest.mark.timeout(60)


class Head(msgspec.Struct, frozen=True):
    number: int


async def test_a_key_without_value_has_revision_zero(bus: Bus, publisher: Publisher) -> None:
    entry = await Register(bus, publisher, "weights", Head).get("policy", "head")
    assert entry.value is None and entry.revision == 0


async def test_of_ten_writers_one_wins_each_round(bus: Bus, publisher: Publisher, connect_again: Connect) -> None:
    """Twenty increments by ten writers, each under compare-and-set: none is lost, none counted twice."""
    registers = []
    for number in range(10):
        one = await connect_again(f"writer-{number}")
        registers.append(Register(one, await Publisher(one).start(), "weights", Head))

    async def increment(register: Register[Head]) -> int:
        refused = 0
        while True:
            entry = await register.get("policy", "head")
            value = Head(entry.value.number + 1 if entry.value else 1)
            try:
                await register.compare_and_set(value, entry.revision, "policy", "head")
            except WrongSequenceError:
                refused += 1
                continue
            return refused

    async with asyncio.timeout(DEADLINE_S):
        refused = await asyncio.gather(*(increment(register) for register in registers * 2))
    assert (await registers[0].get("policy", "head")).value == Head(20)
    assert sum(refused) > 0, "the writers never met"


async def test_a_write_over_what_is_no_longer_there_is_refused(bus: Bus, publisher: Publisher) -> None:
    register = Register(bus, publisher, "weights", Head)
    first = await register.compare_and_set(Head(1), 0, "policy", "head")
    second = await register.compare_and_set(Head(2), first, "policy", "head")
    for stale in (0, first):
        with pytest.raises(WrongSequenceError):
            await register.compare_and_set(Head(9), stale, "policy", "head")
    entry = await register.get("policy", "head")
    assert (entry.value, entry.revision) == (Head(2), second)


async def test_a_watcher_sees_the_value_that_is_there_and_every_change(bus: Bus, publisher: Publisher) -> None:
    register = Register(bus, publisher, "weights", Head)
    await register.put(Head(1), "policy", "head")
    async with register.watch("policy", "head") as changed, asyncio.timeout(DEADLINE_S):
        for number in (1, 2, 3):
            await changed.wait()
            changed.clear()
            assert (await register.get("policy", "head")).value == Head(number)
            await register.put(Head(number + 1), "policy", "head")
        await register.put(Head(0), "policy", "other")
        await changed.wait()
        assert (await register.get("policy", "head")).value == Head(4)


async def test_a_watcher_looks_again_after_a_reconnection(own_server: OwnServer, own_bus: Bus) -> None:
    register = Register(own_bus, await Publisher(own_bus).start(), "weights", Head)
    await register.put(Head(1), "policy", "head")
    async with register.watch("policy", "head") as changed:
        await changed.wait()
        changed.clear()
        await own_server.kill_and_restart()
        await asyncio.wait_for(changed.wait(), DEADLINE_S)
        assert (await register.get("policy", "head")).value == Head(1)


async def test_a_value_expires_after_its_time_to_live(bus: Bus, publisher: Publisher) -> None:
    register = Register(bus, publisher, "lease", Head)
    revision = await register.put(Head(1), "trainer", ttl_s=1)
    assert (await register.get("trainer")).revision == revision
    async with asyncio.timeout(DEADLINE_S):
        while (entry := await register.get("trainer")).value is not None:
            await asyncio.sleep(0.1)
    assert entry.revision == 0
    assert await register.compare_and_set(Head(2), 0, "trainer", ttl_s=5) > revision


async def test_clearing_removes_only_what_was_meant(bus: Bus, publisher: Publisher) -> None:
    register = Register(bus, publisher, "lease", Head)
    first = await register.put(Head(1), "trainer", ttl_s=10)
    second = await register.put(Head(2), "trainer", ttl_s=10)
    await register.clear(first, "trainer")
    assert (await register.get("trainer")).value == Head(2)
    await register.clear(second, "trainer")
    cleared: Entry[Head] = await register.get("trainer")
    assert cleared.value is None and cleared.revision > second
    assert await register.compare_and_set(Head(3), cleared.revision, "trainer", ttl_s=10) > cleared.revision


async def test_a_watcher_never_reads_the_value_from_before_the_change_and_then_waits_for_ever(
    bus: Bus, publisher: Publisher, connect_again: Connect
) -> None:
    """A plain subscription may hear of a value before it is stored: the watcher then read the old one, and hung."""
    other = await connect_again("writer")
    writer = Register(other, await Publisher(other).start(), "weights", Head)
    reader = Register(bus, publisher, "weights", Head)
    async with asyncio.timeout(DEADLINE_S), reader.watch("policy", "head") as changed:
        for number in range(1, 301):
            writing = asyncio.create_task(writer.put(Head(number), "policy", "head"))
            while True:
                changed.clear()
                value = (await reader.get("policy", "head")).value
                if value is not None and value.number >= number:
                    break
                await changed.wait()
            await writing
