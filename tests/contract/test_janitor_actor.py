"""A dead worker's messages come back at once, not after ack_wait; a live worker's are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from actor_fixture import make_context, running
from bus_fixture import DEADLINE_S, small_config

from physarum.actors.janitor.actor import JanitorActor
from physarum.bus import names
from physarum.bus.claims import ClaimBook, ClaimRecord, claim_key
from physarum.bus.connection import Bus
from physarum.bus.presence import GONE, Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.work import WorkQueue
from physarum.configs.bus import BusConfig

pytestmark = pytest.mark.timeout(60)

LONG_S = 600.0
STARTED_AT = 1000.125


@pytest.fixture
def bus_config() -> BusConfig:
    """Without the janitor nothing would come back within the test."""
    return small_config(ack_wait_s=LONG_S)


def beat(state: str, sequence: int = 1, started_at: float = STARTED_AT) -> Heartbeat:
    return Heartbeat(
        role="rollout", instance="rollout-0", state=state, pid=1, host="h", started_at=started_at, sequence=sequence
    )


@asynccontextmanager
async def worker(bus: Bus, publisher: Publisher, claims: ClaimBook | None) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(bus, publisher, "tasks", "tasks_p1", worker="w", ack_wait_s=LONG_S, max_deliver=5, claims=claims)
    async with queue.open() as opened:
        yield opened


async def claimed(bus: Bus, publisher: Publisher, count: int) -> None:
    """Until the register says that the worker holds `count` messages."""
    register: Register[ClaimRecord] = Register(bus, publisher, "claims", ClaimRecord)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            value = (await register.get(*claim_key("rollout", "rollout-0", STARTED_AT))).value
            if value is not None and len(value.acks) == count:
                return
            await asyncio.sleep(0.02)


async def hold_three(bus: Bus, publisher: Publisher, queue: WorkQueue) -> None:
    for number in range(3):
        await publisher.publish(names.subject(bus.run, "tasks", "p1", f"t{number}"), b"x", message_id=f"t{number}")
    taken = await queue.fetch(3, 1.0)
    assert len(taken) == 3
    await claimed(bus, publisher, 3)


async def test_a_dead_workers_messages_are_redelivered_at_once(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    book = ClaimBook(bus, publisher, "rollout", "rollout-0", STARTED_AT)
    keeping = asyncio.create_task(book.keep())
    await announce(bus, publisher, beat("ready"))
    janitor = JanitorActor(make_context(tmp_path, bus, publisher, "janitor"))
    async with running(janitor), worker(bus, publisher, book) as dead, worker(bus, publisher, None) as other:
        await hold_three(bus, publisher, dead)
        keeping.cancel()
        await announce(bus, publisher, beat(GONE, 2))
        async with asyncio.timeout(DEADLINE_S):
            again = []
            while len(again) < 3:
                again += await other.fetch(3, 5.0)
        assert [delivery.deliveries for delivery in again] == [2, 2, 2]
        for delivery in again:
            await delivery.ack()


async def test_a_successor_of_the_same_name_does_not_hide_what_the_dead_process_held(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    book = ClaimBook(bus, publisher, "rollout", "rollout-0", STARTED_AT)
    keeping = asyncio.create_task(book.keep())
    await announce(bus, publisher, beat("ready"))
    janitor = JanitorActor(make_context(tmp_path, bus, publisher, "janitor"))
    async with running(janitor), worker(bus, publisher, book) as dead, worker(bus, publisher, None) as other:
        await hold_three(bus, publisher, dead)
        keeping.cancel()
        await announce(bus, publisher, beat("ready", 1, started_at=STARTED_AT + 5))
        async with asyncio.timeout(DEADLINE_S):
            again = []
            while len(again) < 3:
                again += await other.fetch(3, 5.0)
        for delivery in again:
            await delivery.ack()


async def test_what_was_left_behind_while_no_janitor_was_there_is_returned(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    book = ClaimBook(bus, publisher, "rollout", "rollout-0", STARTED_AT)
    keeping = asyncio.create_task(book.keep())
    async with worker(bus, publisher, book) as dead, worker(bus, publisher, None) as other:
        await hold_three(bus, publisher, dead)
        keeping.cancel()
        async with (
            running(JanitorActor(make_context(tmp_path, bus, publisher, "janitor"))),
            asyncio.timeout(DEADLINE_S),
        ):
            again = []
            while len(again) < 3:
                again += await other.fetch(3, 5.0)
        for delivery in again:
            await delivery.ack()


async def test_a_live_workers_messages_are_left_alone(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    book = ClaimBook(bus, publisher, "rollout", "rollout-0", STARTED_AT)
    keeping = asyncio.create_task(book.keep())
    await announce(bus, publisher, beat("ready"))
    janitor = JanitorActor(make_context(tmp_path, bus, publisher, "janitor"))
    async with running(janitor), worker(bus, publisher, book) as alive, worker(bus, publisher, None) as other:
        await hold_three(bus, publisher, alive)
        await announce(bus, publisher, beat("draining", 2))
        bystander = Heartbeat(
            role="reward", instance="reward-0", state=GONE, pid=2, host="h", started_at=1.0, sequence=9
        )
        await announce(bus, publisher, bystander)
        assert await other.fetch(3, 1.0) == []
    keeping.cancel()
