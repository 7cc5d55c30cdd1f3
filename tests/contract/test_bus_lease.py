"""Leases: one holder, growing tokens, and a holder that lost its lease is told. Two seconds to live instead of ten."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
from bus_fixture import DEADLINE_S, Connect, OwnServer

from physarum.bus import lease as leases
from physarum.bus.connection import Bus
from physarum.bus.errors import LeaseLostError
from physarum.bus.lease import Counter, Lease, LeaseRecord, acquire
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
TTL_S = 2


@pytest.fixture(autouse=True)
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "TTL_S", TTL_S)
    monkeypatch.setattr(leases, "RENEW_S", 0.4)


async def take(bus: Bus, owner: str, name: str = "trainer", lost: threading.Event | None = None) -> Lease:
    publisher = await Publisher(bus).start()
    on_lost = None if lost is None else lost.set
    return await asyncio.wait_for(acquire(bus.endpoint, bus, publisher, name, owner, on_lost), DEADLINE_S)


async def stored(bus: Bus, name: str = "trainer") -> LeaseRecord | None:
    return (await Register(bus, await Publisher(bus).start(), "lease", LeaseRecord).get(name)).value


HOLDER = """
import asyncio, sys
from bus_fixture import connect
from physarum.bus import lease
from physarum.bus.publisher import Publisher

lease.TTL_S, lease.RENEW_S = 2, 0.4

async def main() -> None:
    bus = await connect(sys.argv[1], sys.argv[2])
    held = await lease.acquire(bus.endpoint, bus, await Publisher(bus).start(), "trainer", "victim")
    print(held.token, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_holders_lease_passes_on_with_a_larger_token(bus: Bus) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, bus.endpoint.url, bus.run, stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert holder.stdout is not None
    try:
        assert await asyncio.wait_for(holder.stdout.readline(), DEADLINE_S) == b"1\n"
        waiting = asyncio.create_task(take(bus, "standby"))
        done, _ = await asyncio.wait({waiting}, timeout=TTL_S + 0.5)
        assert not done, "taken while its holder renewed it"
        holder.kill()
        killed = time.monotonic()
        lease = await waiting
        assert time.monotonic() - killed < TTL_S + 4
        assert lease.token == 2
        lease.check()
        record = await stored(bus)
        assert record is not None and (record.owner, record.token) == ("standby", 2)
        await lease.release()
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.wait()


async def test_a_released_lease_passes_on_at_once_and_tokens_grow(bus: Bus) -> None:
    tokens = []
    for owner in ("a", "b", "c"):
        lease = await take(bus, owner)
        tokens.append(lease.token)
        waiting = asyncio.create_task(take(bus, "next"))
        await asyncio.sleep(0)
        waiting.cancel()
        await lease.release()
        assert not lease.lost.is_set(), "a release is no loss"
    assert tokens == [1, 2, 3]


async def test_leases_of_different_names_do_not_meet(bus: Bus) -> None:
    held = [await take(bus, "a", name) for name in ("trainer", "source")]
    assert [lease.token for lease in held] == [1, 1]
    for lease in held:
        await lease.release()


async def test_a_standby_gets_the_lease_when_it_is_released(bus: Bus, connect_again: Connect) -> None:
    first = await take(bus, "a")
    waiting = asyncio.create_task(take(await connect_again("standby"), "b"))
    await asyncio.sleep(0)
    await first.release()
    second = await waiting
    assert second.token == 2
    await second.release()


async def overwrite(bus: Bus, record: LeaseRecord | None) -> None:
    """What another owner would have written while the holder could not renew."""
    publisher = await Publisher(bus).start()
    register = Register(bus, publisher, "lease", LeaseRecord)
    if record is not None:
        await register.put(record, "trainer", ttl_s=60)
    else:
        await register.clear((await register.get("trainer")).revision, "trainer")


async def test_the_old_owner_is_told_after_a_takeover(bus: Bus) -> None:
    told = threading.Event()
    lease = await take(bus, "a", lost=told)
    lease.check()
    await overwrite(bus, LeaseRecord("b", 2, time.time()))
    assert await asyncio.to_thread(told.wait, DEADLINE_S)
    with pytest.raises(LeaseLostError, match=r"lease trainer \(token 1\) was lost: .*This process must stop"):
        lease.check()
    await lease.release()
    assert (await stored(bus)) == LeaseRecord("b", 2, (await stored(bus)).acquired_at)  # type: ignore[union-attr]


async def test_the_old_owner_is_told_also_when_the_second_one_has_come_and_gone(bus: Bus) -> None:
    """The key is free again, but a larger token was given: what the second owner stored fences the first."""
    told = threading.Event()
    lease = await take(bus, "a", lost=told)
    await Register(bus, await Publisher(bus).start(), "run", Counter).put(Counter(2), "epoch", "trainer")
    await overwrite(bus, None)
    assert await asyncio.to_thread(told.wait, DEADLINE_S)
    with pytest.raises(LeaseLostError):
        lease.check()


async def test_a_lease_that_only_expired_is_taken_back_with_its_token(bus: Bus) -> None:
    lease = await take(bus, "a")
    await overwrite(bus, None)
    async with asyncio.timeout(DEADLINE_S):
        while (record := await stored(bus)) is None:
            await asyncio.sleep(0.05)
    assert (record.owner, record.token) == ("a", 1)
    lease.check()
    await lease.release()


async def test_a_blocked_event_loop_does_not_lose_the_lease(bus: Bus, connect_again: Connect) -> None:
    lease = await take(bus, "a")
    waiting = asyncio.create_task(take(await connect_again("standby"), "b"))
    await asyncio.sleep(0)
    time.sleep(4)  # twice the time to live
    lease.check()
    record = await stored(bus)
    assert record is not None and record.owner == "a" and not waiting.done()
    waiting.cancel()
    await lease.release()


async def test_a_server_restart_shorter_than_the_time_to_live_does_not_lose_the_lease(
    own_server: OwnServer, own_bus: Bus
) -> None:
    lease = await take(own_bus, "a")
    await own_server.kill_and_restart()
    register = Register(own_bus, await Publisher(own_bus).start(), "lease", LeaseRecord)
    async with register.watch("trainer") as changed, asyncio.timeout(DEADLINE_S):
        for _ in range(4):  # three renewals after the restart
            await changed.wait()
            changed.clear()
    lease.check()
    record = await stored(own_bus)
    assert record is not None and (record.owner, record.token) == ("a", 1)
    await lease.release()


async def test_giving_up_the_wait_leaves_no_keeper_behind(bus: Bus) -> None:
    held = await take(bus, "a")
    before = threading.active_count()
    waiting = asyncio.create_task(take(bus, "b"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert threading.active_count() <= before
    await held.release()
    assert "lease trainer" not in {thread.name for thread in threading.enumerate()}


async def test_a_lease_taken_while_its_keeper_started_is_not_stolen_back(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the revision that this acquisition wrote may be renewed, not whatever stands there by then."""
    next_token = leases._next_token

    async def slow(*arguments: object) -> int:
        token = await next_token(*arguments)  # type: ignore[arg-type]
        await overwrite(bus, LeaseRecord("b", 9, time.time()))
        return token

    monkeypatch.setattr(leases, "_next_token", slow)
    with pytest.raises(LeaseLostError, match="the first renewal failed"):
        await take(bus, "a")
    record = await stored(bus)
    assert record is not None and (record.owner, record.token) == ("b", 9)
