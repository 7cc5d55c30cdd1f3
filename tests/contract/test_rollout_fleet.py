"""Engines that are saturated, sick, drained and replaced while episodes run, and groups that go on without a member."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from bus_fixture import DEADLINE_S
from test_fault_rollout import ASKING, HOOKS, StubEngine, actor, issue, ordinals, until

from physarum.actors.wire import read_header
from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.ledger import GroupClosedRecord, Ledger
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


class Busy(StubEngine):
    """Takes a moment for each answer, and knows how many there were at once."""

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__()
        self.now, self.most, self.seconds = 0, 0, seconds

    async def says(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
            return await super().says(request, body)
        finally:
            self.now -= 1


class Presence:
    """Engine actors and other workers, as they announce themselves; each word is heard when it returns."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus, self._publisher = bus, publisher
        self._numbers = itertools.count(1)

    async def engine(self, name: str, port: int, state: str = "ready", started_at: float = 1.0, **load: Any) -> None:
        facts: dict[str, Any] = {"group": "policy", "url": f"http://127.0.0.1:{port}", "version": "policy@1.0"}
        facts |= {"load": {"there": 0, "tokens": 0, **load}} if load else {}
        await self.says("engine", name, state, started_at, facts)

    async def worker(self, name: str, demand: int) -> None:
        await self.says("rollout", name, "ready", 1.0, {"demand": demand})

    async def says(self, role: str, name: str, state: str, started_at: float, facts: dict[str, Any]) -> None:
        beat = Heartbeat(
            role=role, instance=name, state=state, pid=1, host="h", started_at=started_at,
            sequence=next(self._numbers), facts=facts,
        )  # fmt: skip
        await announce(self._bus, self._publisher, beat)


@pytest.fixture
def presence(bus: Bus, publisher: Publisher) -> Presence:
    return Presence(bus, publisher)


async def nothing_died(bus: Bus) -> bool:
    return (await log.state(bus, "dead")).messages == 0


async def test_no_engine_has_more_than_its_limit_and_every_place_is_used(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    first, second = Busy(), Busy()
    async with first.serving() as one, second.serving() as two:
        await presence.engine("policy-0", one, limit=3)
        await presence.engine("policy-1", two, limit=2)
        made = actor(tmp_path, bus, publisher, *ASKING, "rollout.slots=16", "bus.max_deliver=1")
        await issue(made, ["ask"] * 40)
        async with running(made):
            assert await ordinals(bus, 40) == Counter(range(40))
    assert (first.most, second.most) == (3, 2)


async def test_a_worker_leaves_others_their_share(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    engine = Busy()
    async with engine.serving() as port:
        await presence.engine("policy-0", port, limit=8)
        for worker in ("rollout-0", "rollout-7"):
            await presence.worker(worker, demand=1000)
        made = actor(tmp_path, bus, publisher, *ASKING, "rollout.slots=16")
        await issue(made, ["ask"] * 30)
        async with running(made):
            await ordinals(bus, 30)
    assert engine.most == 4


async def test_waiting_for_a_saturated_engine_ends_no_episode(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    """Eight episodes of 0.1 s share one place: the last waits for longer than an episode may take."""
    engine = Busy(0.1)
    async with engine.serving() as port:
        await presence.engine("policy-0", port, limit=1)
        limits = ("rollout.slots=8", "rollout.episode_timeout_s=0.4", "bus.max_deliver=1")
        made = actor(tmp_path, bus, publisher, *ASKING, *limits)
        await issue(made, ["ask"] * 8)
        async with running(made):
            assert await ordinals(bus, 8) == Counter(range(8))
    assert await nothing_died(bus)


async def test_an_engine_that_answers_nothing_but_errors_is_left_out(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    """It says that it is ready all the while; only its answers tell."""
    well, sick = Busy(), Busy()

    async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503, text="no")

    sick.answer = fails
    async with well.serving() as one, sick.serving() as two:
        await presence.engine("policy-0", one)
        await presence.engine("policy-1", two)
        options = ("rollout.slots=4", "rollout.routing.breaker_base_s=30", "bus.max_deliver=1")
        made = actor(tmp_path, bus, publisher, *ASKING, *options)
        await issue(made, ["ask"] * 40)
        async with running(made):
            assert await ordinals(bus, 40) == Counter(range(40))
    assert 3 <= sick.requests.total() <= 3 + 4, "what was there when it tripped"
    assert await nothing_died(bus)


async def test_episodes_notice_nothing_while_engines_come_drain_die_and_are_replaced(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    """Two turns each. Engine 0 drains with requests in flight, 1 dies with them, 2 comes, 1 is started anew elsewhere."""
    engines = [Busy() for _ in range(4)]
    two_turns = (f"rollout.generate={HOOKS}:ask_twice", "rollout.args={}", "rollout.slots=8", "bus.max_deliver=1")
    made = actor(tmp_path, bus, publisher, *two_turns)
    async with engines[0].serving() as port, running(made):
        await presence.engine("policy-0", port, limit=4)
        async with engines[1].serving() as dying:
            await presence.engine("policy-1", dying, limit=4)
            await issue(made, ["ask"] * 60)
            await ordinals(bus, 10)
            await presence.engine("policy-0", port, state="draining", limit=4)
            await ordinals(bus, 20)
            drained = engines[0].requests.total()
        async with engines[2].serving() as third, engines[3].serving() as fourth:
            await presence.engine("policy-2", third, limit=4)
            await presence.engine("policy-1", fourth, started_at=2.0, limit=4)
            assert await ordinals(bus, 60) == Counter(range(60))
    assert await nothing_died(bus)
    assert engines[0].requests.total() == drained, "a draining engine gets nothing new"
    assert all(one.requests.total() > 0 for one in engines)


async def test_the_turns_of_an_episode_stay_on_one_engine(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    first, second = Busy(), Busy()
    two_turns = (f"rollout.generate={HOOKS}:ask_twice", "rollout.args={}", "rollout.slots=8")
    async with first.serving() as one, second.serving() as two:
        await presence.engine("policy-0", one)
        await presence.engine("policy-1", two)
        made = actor(tmp_path, bus, publisher, *two_turns)
        await issue(made, ["ask"] * 20)
        async with running(made):
            await ordinals(bus, 20)
    assert set(first.requests.values()) | set(second.requests.values()) == {2}
    assert not first.requests.keys() & second.requests.keys()
    assert first.requests and second.requests


@contextlib.asynccontextmanager
async def one_that_hangs(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events: the engine was asked; its request was closed."""
    engine, asked, closed = StubEngine(), asyncio.Event(), asyncio.Event()

    async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()
        raise AssertionError("cancelled before")

    engine.answer = hangs
    async with engine.serving() as port:
        await presence.engine("policy-0", port)
        made = actor(tmp_path, bus, publisher, *ASKING, "groups.enough=1", "source.group_size=2", "rollout.slots=1")
        await issue(made, ["ask"] * 2)
        async with running(made):
            yield asked, closed


async def test_an_episode_whose_group_went_on_is_cut_off_and_accounted_for(
    tmp_path: Path, bus: Bus, publisher: Publisher, presence: Presence
) -> None:
    async with one_that_hangs(tmp_path, bus, publisher, presence) as (asked, closed), asyncio.timeout(DEADLINE_S):
        await asked.wait()
        ledger = Ledger(bus, publisher, 0, epoch=1)
        for ordinal in (0, 1):  # the second one has not begun
            group = f"main/0/{ordinal}"
            await ledger.append(GroupClosedRecord(group=group, size=1, members=[], missing=[0], trained=True))
        await closed.wait()
        entries = await until(bus, "samples", 2)
        while (await log.state(bus, "tasks")).messages:
            await asyncio.sleep(0.02)
    headers = [read_header(entry.headers) for entry in entries]
    assert sorted(header.ordinal for header in headers) == [0, 1]
    assert all(one.status == "aborted" and not one.trainable for header in headers for one in header.samples)
    assert await nothing_died(bus)
