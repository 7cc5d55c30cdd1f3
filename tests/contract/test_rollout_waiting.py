"""A worker without tasks keeps one request open on each class and asks for nothing else; what comes is taken at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from bus_fixture import DEADLINE_S
from fault_line import context, prepare
from nats.aio.msg import Msg
from test_fault_rollout import actor, issue

from physarum.actors.rollout.tasks import TaskQueue
from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.names import TASK_CLASSES
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)

WAIT_S = 0.4
PERIODS = 5


async def test_an_idle_worker_asks_once_for_each_class_and_waiting_time(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    asked: Counter[str] = Counter()

    async def count(message: Msg) -> None:
        asked[message.subject.rpartition(".")[2]] += 1

    await bus.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{bus.run}_TASKS.*", count)
    folder = prepare(tmp_path, bus.run, f"bus.fetch_timeout_s={WAIT_S}")
    surroundings = context(folder, bus, publisher, "rollout")
    queue, draining = TaskQueue(surroundings, slots=4), asyncio.Event()
    await surroundings.heartbeat_publisher.start()
    keeping = asyncio.create_task(surroundings.claims.keep())
    async with queue.open():
        waiting = asyncio.create_task(queue.next(draining))
        await asyncio.sleep(PERIODS * WAIT_S)
        before = asked.copy()
        assert (await log.state(bus, "claims")).last == 0, "who holds nothing writes no claims"
        await issue(actor(tmp_path, bus, publisher), ["good"])
        async with asyncio.timeout(DEADLINE_S):
            delivery = await waiting
        assert delivery is not None
        await delivery.ack()
    keeping.cancel()
    assert before.keys() == {f"tasks_{name}" for name in TASK_CLASSES}
    # One to look, then waiting ones, each half as long as configured at least.
    assert all(1 < number <= 2 + 2 * PERIODS for number in before.values()), before
