"""SIGKILL at random messages, of any process and of the bus: what is trained is the data, once, in the recorded order.

The trainer's weights are a digest chained over its batches, so they equal the ledger's account of them only if every
step that survives was trained exactly once, on exactly what its plan says, after exactly the steps before it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from bus_fixture import OwnServer
from fault_line import LINE, Crew, check, finished, prepare
from nats.aio.msg import Msg

from physarum.bus import ledger
from physarum.bus.connection import Bus
from physarum.bus.ledger import RollbackRecord
from physarum.bus.publisher import Publisher

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SERVER = "nats-server"
VICTIMS = ("rollout", "rollout", "reward", "reward", "trainer", "source", "janitor", SERVER)
"""A trainer or source is followed after its lease has expired, so they are killed less often."""
ROWS = 150
MESSAGES_BETWEEN = 120
DEADLINE_S = 150.0


class Traffic:
    """Counts every message of the run, heartbeats and acknowledgements too, and calls at the one that was asked for."""

    def __init__(self) -> None:
        self._left = 0
        self._due = asyncio.Event()

    async def on_message(self, message: Msg) -> None:
        self._left -= 1
        if self._left <= 0:
            self._due.set()

    async def messages(self, count: int) -> None:
        self._left = count
        self._due.clear()
        await self._due.wait()


@asynccontextmanager
async def crew(place: Path, bus: Bus) -> AsyncIterator[Crew]:
    overrides = [f"source.args.size={ROWS}", "rollout.args.seconds=0.02", "bus.max_deliver=1000", "groups.refills=0"]
    folder = prepare(place, bus.run, *overrides)
    folder.endpoint.write_bytes(msgspec.json.encode(bus.endpoint))
    made = Crew(folder)
    try:
        for role in (*LINE, "janitor"):
            made.start(role)
        yield made
    finally:
        made.end()


async def kill_at_random(made: Crew, server: OwnServer, bus: Bus, count: int, rng: random.Random) -> None:
    traffic = Traffic()
    await bus.client.subscribe(f"ph.{bus.run}.>", cb=traffic.on_message)
    rounds = itertools.chain.from_iterable(rng.sample(VICTIMS, len(VICTIMS)) for _ in itertools.count())
    for victim in itertools.islice(rounds, count):
        await traffic.messages(rng.randint(1, MESSAGES_BETWEEN))
        if victim == SERVER:
            made.kills[SERVER] += 1
            await server.kill_and_restart()
        else:
            await asyncio.to_thread(made.kill, victim)
        made.restart_ended()


async def tended(made: Crew) -> None:
    """As a supervisor: what ended by itself (its lease was lost meanwhile) is started again."""
    while True:
        await asyncio.sleep(0.2)
        made.restart_ended()


async def storm(place: Path, server: OwnServer, bus: Bus, count: int, seed: int) -> None:
    publisher = await Publisher(bus).start()
    async with crew(place, bus) as made:
        async with asyncio.timeout(DEADLINE_S):
            await kill_at_random(made, server, bus, count, random.Random(seed))
            tending = asyncio.create_task(tended(made))
            await finished(bus, publisher, DEADLINE_S)
            tending.cancel()
        assert made.kills.total() == count
        account = await check(bus, made.folder, Counter((ordinal, 0) for ordinal in range(2 * ROWS)))
        epochs = [item.record.new_epoch for item in await ledger.read(bus) if isinstance(item.record, RollbackRecord)]
    assert (account.dead, account.dropped, account.in_flight) == (0, 0, 0)
    assert epochs == sorted(set(epochs)), "each trainer has a later epoch than the one before"


async def test_kills_at_random_messages_lose_nothing_and_train_nothing_twice(
    tmp_path: Path, own_server: OwnServer, own_bus: Bus
) -> None:
    await storm(tmp_path, own_server, own_bus, count=10, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
async def test_fifty_kills_at_random_messages_lose_nothing_and_train_nothing_twice(
    tmp_path: Path, own_server: OwnServer, own_bus: Bus, seed: int
) -> None:
    await storm(tmp_path, own_server, own_bus, count=50, seed=seed)
