"""Presence: who is there is known at once to newcomers, and who falls silent is gone after the expiry."""

from __future__ import annotations

import asyncio
import time

import pytest
from bus_fixture import DEADLINE_S, Connect, OwnServer

from physarum.bus import names, presence
from physarum.bus.connection import Bus
from physarum.bus.presence import GONE, Heartbeat, Roster, announce
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


def beat(
    instance: str, sequence: int, state: str = "running", *, role: str = "engine", started_at: float = 1.0
) -> Heartbeat:
    return Heartbeat(
        role=role, instance=instance, state=state, pid=1, host="h", started_at=started_at, sequence=sequence,
        facts={"url": f"http://{instance}"},
    )  # fmt: skip


async def until(roster: Roster, *instances: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while [member.instance for member in roster.members] != list(instances):
            roster.changed.clear()
            if [member.instance for member in roster.members] == list(instances):
                return
            await roster.changed.wait()


async def test_members_join_change_and_leave(bus: Bus, publisher: Publisher) -> None:
    changes: list[int] = []
    async with Roster(bus, "engine", on_change=lambda: changes.append(1)).open() as roster:
        assert roster.members == []
        await announce(bus, publisher, beat("e-1", 1, "starting"))
        await announce(bus, publisher, beat("e-0", 1))
        await announce(bus, publisher, beat("r-0", 1, role="rollout"))
        await until(roster, "e-0", "e-1")
        await announce(bus, publisher, beat("e-1", 2, "serving"))
        await announce(bus, publisher, beat("e-0", 2, GONE))
        await until(roster, "e-1")
        assert roster.members[0].state == "serving" and roster.members[0].facts == {"url": "http://e-1"}
        assert len(changes) == 4


async def test_a_newcomer_sees_everybody_at_once(bus: Bus, publisher: Publisher, connect_again: Connect) -> None:
    for number in range(30):
        await announce(bus, publisher, beat(f"e-{number:02}", 5))
    async with Roster(await connect_again("newcomer")).open() as roster:
        assert [member.instance for member in roster.members] == [f"e-{number:02}" for number in range(30)]


async def test_a_roster_of_named_ones_hears_nobody_else(bus: Bus, publisher: Publisher) -> None:
    """A machine's supervisor needs its own actors: a thousand of them that each heard all would be millions of messages."""
    heard: list[str] = []
    await announce(bus, publisher, beat("e-0", 1))
    await announce(bus, publisher, beat("e-1", 1))
    async with Roster(
        bus, on_beat=lambda one: heard.append(f"{one.instance}:{one.sequence}"), named=True
    ).open() as roster:
        assert roster.members == []
        await roster.listen_to("engine", "e-1")
        await until(roster, "e-1")
        await roster.listen_to("rollout", "r-0")
        await announce(bus, publisher, beat("e-0", 2))
        await announce(bus, publisher, beat("r-0", 1, role="rollout"))
        await until(roster, "e-1", "r-0")
        await announce(bus, publisher, beat("e-1", 2, GONE))
        await until(roster, "r-0")
    assert heard == ["e-1:1", "r-0:1", "e-1:2"]


async def test_who_has_said_goodbye_is_not_in_a_newcomers_list(bus: Bus, publisher: Publisher) -> None:
    await announce(bus, publisher, beat("e-0", 1))
    await announce(bus, publisher, beat("e-0", 2, GONE))
    async with Roster(bus, "engine").open() as roster:
        assert roster.members == []


async def test_who_falls_silent_is_gone_after_the_expiry(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "EXPIRY_S", 1)
    async with Roster(bus, "engine").open() as roster:
        await announce(bus, publisher, beat("e-0", 1))
        await until(roster, "e-0")
        heard = time.monotonic()
        await until(roster)
        assert 0.5 < time.monotonic() - heard < 5
    async with asyncio.timeout(DEADLINE_S):
        while True:  # the stored heartbeat expires too, so newcomers do not see the dead
            async with Roster(bus, "engine").open() as roster:
                if not roster.members:
                    return
                await roster.wait_change(0.2)


async def test_an_old_heartbeat_does_not_undo_a_newer_one(bus: Bus, publisher: Publisher) -> None:
    async with Roster(bus, "engine").open() as roster:
        for one in (
            beat("e-0", 7, "serving"),
            beat("e-0", 6, "starting"),
            beat("e-1", 9, GONE),
            beat("e-1", 8),
            beat("z", 1),
        ):
            await announce(bus, publisher, one)
        await until(roster, "e-0", "z")
        assert roster.members[0].state == "serving"
        await announce(bus, publisher, beat("e-0", 1, "starting", started_at=2.0))  # a new process counts from one
        await announce(bus, publisher, beat("zz", 1))
        await until(roster, "e-0", "z", "zz")
        assert roster.members[0].state == "starting"


@pytest.mark.parametrize("left", [GONE, "killed"])
async def test_whose_clock_is_behind_its_predecessors_is_heard_once_that_one_is_over(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """An actor that moved to a host whose clock is an hour behind was there for as long as it lived, and nobody knew."""
    monkeypatch.setattr(presence, "EXPIRY_S", 1)
    async with Roster(bus, "engine").open() as roster:
        await announce(bus, publisher, beat("e-0", 7, started_at=3600.0))
        await until(roster, "e-0")
        if left == GONE:
            await announce(bus, publisher, beat("e-0", 8, GONE, started_at=3600.0))
            await until(roster)
        for sequence in range(1, 40):
            await announce(bus, publisher, beat("e-0", sequence, started_at=2.0))
            if any(member.started_at == 2.0 for member in roster.members):
                break
            await roster.wait_change(0.1)
        assert [member.started_at for member in roster.members] == [2.0]


async def test_a_dead_members_entry_can_be_forgotten(bus: Bus, publisher: Publisher) -> None:
    async with Roster(bus, "engine").open() as roster:
        await announce(bus, publisher, beat("e-0", 1))
        await until(roster, "e-0")
        roster.forget("engine", "e-0")
        assert roster.members == []


async def test_waiting_for_a_change_ends_at_its_deadline(bus: Bus) -> None:
    async with Roster(bus, "engine").open() as roster:
        assert await roster.wait_change(0.05) is False


async def test_foreign_and_unreadable_heartbeats_are_refused(bus: Bus, publisher: Publisher) -> None:
    subject = names.subject(bus.run, "presence", "engine", "x")
    async with Roster(bus, "engine").open() as roster:
        await publisher.publish(subject, b"not a heartbeat", ttl_s=10)
        await publisher.publish(subject, b"foreign", headers={"Ph-Run": "other"}, ttl_s=10)
        await announce(bus, publisher, beat("e-0", 1))
        await until(roster, "e-0")
    assert bus.foreign_messages == 1


async def test_an_outage_of_the_bus_is_not_everybodys_death(
    own_server: OwnServer, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "EXPIRY_S", 1)
    publisher = await Publisher(own_bus).start()
    gone: list[bool] = []
    async with Roster(own_bus, "engine", on_change=lambda: gone.append(not roster.members)).open() as roster:
        await announce(own_bus, publisher, beat("e-0", 1))
        await until(roster, "e-0")
        own_server.kill()
        assert await roster.wait_change(2.0) is False, "somebody was declared gone while nobody could be heard"
        await own_server.start()
        await announce(own_bus, publisher, beat("e-0", 2))
        async with asyncio.timeout(DEADLINE_S):
            while roster.members[0].sequence != 2:
                await asyncio.sleep(0.01)
    assert not any(gone)
