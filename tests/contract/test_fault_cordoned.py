"""A cordoned worker takes nothing more, and holds nothing: what comes by a request that was open goes to others at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actor_fixture import actor_process, eventually, running
from bus_fixture import DEADLINE_S
from nats.aio.msg import Msg
from test_fault_rollout import actor, issue, until
from test_reward_actor import execution, reward_context, scored

from physarum.actors import cordons
from physarum.actors.reward.actor import RewardActor
from physarum.actors.wire import publish_execution
from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.presence import Roster
from physarum.bus.publisher import Publisher
from physarum.bus.work import Delivery, WorkQueue

pytestmark = pytest.mark.timeout(60)

LEASE_S = 30.0
"""Of every lease here: longer than any of these tests waits."""
BUS = (f"bus.ack_wait_s={LEASE_S}", f"bus.fetch_timeout_s={LEASE_S}", "bus.max_deliver=5")


async def _waiting(bus: Bus, consumers: set[str]) -> asyncio.Event:
    """Set once a request that waits is open on each of the consumers."""
    waiting, open_ = asyncio.Event(), set[str]()

    async def asked(message: Msg) -> None:
        if b"expires" in message.data:
            open_.add(message.subject.rpartition(".")[2])
        if consumers <= open_:
            waiting.set()

    await bus.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", asked)
    return waiting


async def _taken(queue: WorkQueue, count: int) -> list[Delivery]:
    """What another worker gets while leases last."""
    found: list[Delivery] = []
    async with asyncio.timeout(LEASE_S / 3):
        while len(found) < count:
            found += await queue.fetch(count, 1.0)
    return found


def _other(bus: Bus, publisher: Publisher, key: str, durable: str) -> WorkQueue:
    return WorkQueue(bus, publisher, key, durable, worker="other", ack_wait_s=LEASE_S, max_deliver=5)  # type: ignore[arg-type]


async def test_a_rollout_that_is_cordoned_while_it_waits_leaves_its_tasks_to_others(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    made = actor(tmp_path, bus, publisher, *BUS)
    waiting = await _waiting(bus, {f"tasks_{name}" for name in ("partial", "eval", "p0", "p1")})
    async with running(made):
        async with asyncio.timeout(DEADLINE_S):
            await waiting.wait()
        made.context.pause()
        await issue(made, ["good"] * 3)
        async with _other(bus, publisher, "tasks", "tasks_p1").open() as other:
            for delivery in await _taken(other, 3):
                await delivery.give_back()
        assert (await log.state(bus, "episodes")).messages == 0
        made.context.resume()
        await until(bus, "episodes", 3)
        await eventually(lambda: made.numbers["running"] == 0)  # the autoscaler took idle ones for full ones, for ever


async def test_an_actor_that_is_cordoned_stays_so_when_it_is_started_again(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """A sick one that somebody had cordoned took work again by its own death."""
    context = reward_context(tmp_path, bus, publisher)
    instance, heard = context.identity.instance, asyncio.Event()
    async with Roster(bus, "reward", on_change=heard.set).open() as roster:

        async def until_it_is(state: str) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while [beat.state for beat in roster.members if beat.instance == instance] != [state]:
                    heard.clear()
                    await heard.wait()

        await cordons.record(bus, publisher, more=[instance])
        for _ in range(2):
            with actor_process(context) as process:
                await until_it_is("paused")
                process.kill()
        await cordons.record(bus, publisher, fewer=[instance])
        with actor_process(context):
            await until_it_is("ready")


async def test_a_reward_that_is_cordoned_while_it_waits_leaves_executions_to_others(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = reward_context(tmp_path, bus, publisher, *BUS)
    waiting, made = await _waiting(bus, {"episodes_train"}), RewardActor(context)
    async with running(made):
        await eventually(lambda: made.state == "ready")
        async with asyncio.timeout(DEADLINE_S):
            await waiting.wait()
        context.pause()
        for name in ("one", "true"):
            await publish_execution(context, "episodes", execution(bus.run, name, name))
        async with _other(bus, publisher, "episodes", "episodes_train").open() as other:
            for delivery in await _taken(other, 2):
                await delivery.give_back()
        assert (await log.state(bus, "samples")).messages == 0
        context.resume()
        assert set(await scored(context, 2)) == {"one", "true"}
