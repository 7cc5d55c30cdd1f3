"""Whatever happens to engines and requests in whatever order: no place is lost, and nobody waits beside an engine with room."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_router import Line, load

from physarum.agents.errors import EngineFailedError
from physarum.agents.fleet.breaker import BreakerPolicy
from physarum.agents.routing import EngineRef

pytestmark = pytest.mark.timeout(60)

NAMES = ("a", "b", "c")


class Play:
    """Random events over one router; `refs` are out, `waiting` ask."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.line = Line(breaker=BreakerPolicy(failures=2, base_s=60.0, max_s=60.0))
        self.refs: list[EngineRef] = []
        self.waiting: list[asyncio.Task[EngineRef]] = []
        self.started_at = 0.0

    def step(self) -> None:
        getattr(self, self.rng.choice(("speak", "leave", "ask", "ask", "release", "release", "fail", "cancel")))()

    def speak(self) -> None:
        self.started_at += self.rng.choice((0.0, 0.0, 0.0, 1.0))
        limit = self.rng.choice((1, 2, 4, None))
        state = self.rng.choice(("ready", "ready", "ready", "draining", "unreachable"))
        self.line.engines.says(
            self.rng.choice(NAMES),
            state,
            self.started_at,
            version=f"policy@1.{self.rng.randrange(3)}",
            load=load(limit),
        )
        self.line.router.notify()

    def leave(self) -> None:
        self.line.engines.beats.pop(self.rng.choice(NAMES), None)
        self.line.router.notify()

    def ask(self) -> None:
        changes = self.rng.choice(({}, {}, {"number": 1}, {"minimum": 1}, {"resumes": True}))
        self.waiting.append(self.line.asks(deadline_s=60.0, **changes))

    def release(self) -> None:
        if self.refs:
            ref = self.refs.pop(self.rng.randrange(len(self.refs)))
            self.line.router.served(ref, self.rng.randrange(100))
            self.line.router.release(ref)

    def fail(self) -> None:
        if self.refs:
            ref = self.refs.pop(self.rng.randrange(len(self.refs)))
            error = self.rng.choice((ConnectionRefusedError(), TimeoutError(), EngineFailedError("u", 500, "")))
            self.line.router.failed(ref, error)
            self.line.router.release(ref)

    def cancel(self) -> None:
        if self.waiting:
            self.rng.choice(self.waiting).cancel()

    async def settle(self) -> None:
        """Lets the woken run, and takes over what they were given."""
        for _ in range(3):
            await asyncio.sleep(0)
        done = [task for task in self.waiting if task.done()]
        self.waiting = [task for task in self.waiting if not task.done()]
        self.refs += [task.result() for task in done if not task.cancelled()]

    def check(self) -> None:
        router, now = self.line.router, time.monotonic()
        assert len(router._tickets) == len(self.refs)
        assert router.demand == len(self.refs) + len(self.waiting)
        for engine in router._engines.values():
            out = [ticket for ticket in router._tickets.values() if ticket.engine is engine]
            assert engine.requests == len(out)
            assert abs(engine.tokens - sum(ticket.tokens for ticket in out)) < 1e-3
        for queue in router._waiting:
            for waiter in queue:
                able = [
                    one for one in router._engines.values() if one.able(waiter.kind, now) and one.breaker.allows(now)
                ]
                assert all(one.share is not None and one.share <= one.requests for one in able), "beside one with room"


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_place_is_lost_and_nobody_waits_beside_an_engine_with_room(seed: int) -> None:
    async def played() -> None:
        play = Play(seed)
        for _ in range(80):
            play.step()
            await play.settle()
            play.check()
        for task in play.waiting:
            task.cancel()
        await play.settle()
        while play.refs:
            play.release()
        assert play.line.router.demand == 0
        assert not play.line.router._kinds

    asyncio.run(played())
