"""The router of one rollout actor: versions, shares, breakers, who waits and who goes first."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from physarum.actors.rollout.router import PresenceRouter
from physarum.agents.errors import EngineFailedError, EngineRefusedError, NoEngineError, OffPinError
from physarum.agents.fleet.breaker import BreakerPolicy
from physarum.agents.fleet.choice import ChoiceRules, Wanted
from physarum.agents.routing import EngineRef
from physarum.bus.presence import Heartbeat

pytestmark = pytest.mark.timeout(20)

SOON = BreakerPolicy(base_s=0.02, max_s=0.02)


class Present:
    """A roster as the router reads it."""

    def __init__(self, role: str = "engine") -> None:
        self.role = role
        self.beats: dict[str, Heartbeat] = {}

    @property
    def members(self) -> list[Heartbeat]:
        return [self.beats[name] for name in sorted(self.beats)]

    def says(self, name: str, state: str = "ready", started_at: float = 0.0, **facts: Any) -> None:
        before = self.beats.get(name)
        base = {"group": "policy", "url": f"http://{name}", "version": "policy@1.0"}
        self.beats[name] = Heartbeat(
            role=self.role, instance=name, state=state, pid=1, host="h", started_at=started_at,
            sequence=before.sequence + 1 if before else 1, facts=base | facts,
        )  # fmt: skip


def load(limit: int | None = None, there: int = 0, capacity: int | None = None) -> dict[str, Any]:
    return {"limit": limit, "there": there, "tokens": 0, "capacity": capacity}


def wants(length: int = 8, **changes: Any) -> Wanted:
    return Wanted(tokens=np.arange(length, dtype=np.int32), max_new_tokens=100, **changes)


class Line:
    """A router over engines of a test, with what it gave out."""

    def __init__(self, workers: Present | None = None, **options: Any) -> None:
        self.engines = Present()
        options = {"rules": ChoiceRules(patience_s=0.0)} | options
        self.router = PresenceRouter(
            self.engines, "policy", workers=workers, me="rollout-0", rng=random.Random(0), **options  # type: ignore[arg-type]
        )  # fmt: skip

    def says(self, name: str, **facts: Any) -> None:
        self.engines.says(name, **facts)
        self.router.notify()

    async def pick(self, deadline_s: float = 5.0, **changes: Any) -> EngineRef:
        return await self.router.pick(deadline_s, wants(**changes))

    def asks(self, **changes: Any) -> asyncio.Task[EngineRef]:
        return asyncio.create_task(self.pick(**changes))


async def test_a_probe_that_is_refused_was_answered() -> None:
    """An engine that had recovered took one request at a time for as long as each of them was a bad one."""
    line = Line(breaker=SOON)
    line.says("a")
    first = await line.pick()
    line.router.failed(first, ConnectionRefusedError())
    line.router.release(first)
    probe = await line.pick()
    line.router.failed(probe, EngineRefusedError("http://a", 400, "too long"))
    line.router.release(probe)
    refs = [await line.pick(deadline_s=0.5) for _ in range(2)]
    for ref in refs:
        line.router.release(ref)


async def test_the_number_decides_and_the_epoch_does_not() -> None:
    line = Line()
    line.says("a", version="policy@1.6")
    line.says("b", version="policy@3.7")
    assert (await line.pick(number=7)).version == "policy@3.7"
    assert (await line.pick(minimum=7)).version == "policy@3.7"
    assert (await line.pick(number=6)).version == "policy@1.6"


async def test_no_engine_with_these_weights_is_named() -> None:
    line = Line()
    line.says("a", version="policy@1.6")
    with pytest.raises(NoEngineError, match="was ready and served weights 8 within"):
        await line.pick(0.01, number=8)
    with pytest.raises(NoEngineError, match="served weights 7 or newer within"):
        await line.pick(0.01, minimum=7)
    assert line.router.demand == 0


async def test_a_pinned_request_is_served_when_an_engine_comes_to_its_weights() -> None:
    line = Line()
    line.says("a", version="policy@1.6")
    pinned = line.asks(number=7)
    assert (await line.pick()).instance == "a", "others are not held up"
    line.says("a", version="policy@1.7")
    assert (await pinned).version == "policy@1.7"


@pytest.mark.parametrize("state", ["draining", "quarantined", "unreachable", "waiting for weights", "starting"])
async def test_only_ready_engines_of_the_group_are_chosen(state: str) -> None:
    line = Line()
    line.says("a", state=state)
    line.says("judge", group="judge")
    with pytest.raises(NoEngineError, match=f"a is {state}"):
        await line.pick(0.01)


async def test_least_work_counts_what_others_have_there() -> None:
    line = Line()
    line.says("a", load=load(there=30))
    line.says("b", load=load(there=2))
    assert {(await line.pick()).instance for _ in range(5)} == {"b"}


async def test_a_session_stays_on_its_engine_until_that_is_saturated() -> None:
    line = Line()
    line.says("a", load=load(limit=2))
    line.says("b", load=load(limit=2))
    refs = [await line.pick(prefers="b") for _ in range(3)]
    assert [ref.instance for ref in refs] == ["b", "b", "a"]


async def test_what_shares_a_prompt_goes_where_it_was_sent_before() -> None:
    line = Line(rules=ChoiceRules(slack_tokens=4096))
    line.says("a")
    line.says("b")
    first = await line.pick(length=1024)
    assert {(await line.pick(length=1024)).instance for _ in range(2)} == {first.instance}
    line.says(first.instance, version="policy@1.1")
    assert (await line.pick(length=1024)).instance != first.instance, "its cache is of other weights now"


async def test_a_saturated_engine_is_waited_for_and_who_resumes_goes_first() -> None:
    line = Line()
    line.says("a", load=load(limit=1))
    out = await line.pick()
    new, resumed = line.asks(deadline_s=0.01), line.asks(resumes=True)
    await asyncio.sleep(0.03)
    assert not new.done(), "saturation is no absence"
    line.router.release(out)
    line.router.release(await resumed)
    assert (await new).instance == "a"


async def test_waiters_of_a_kind_leave_in_the_order_they_came() -> None:
    line = Line()
    line.says("a", load=load(limit=1))
    out, order = await line.pick(), []
    waiting = [line.asks() for _ in range(5)]
    for index, task in enumerate(waiting):
        task.add_done_callback(lambda _, index=index: order.append(index))
    await asyncio.sleep(0)
    line.router.release(out)
    for task in waiting:
        line.router.release(await task)
    await asyncio.sleep(0)
    assert order == [0, 1, 2, 3, 4]


async def test_a_place_goes_to_a_session_that_is_at_home_there_and_to_others_before_it_is_idle() -> None:
    line = Line()
    line.says("a", load=load(limit=1))
    line.says("b", load=load(limit=1))
    on_a = await line.pick(prefers="a")
    on_b = await line.pick(prefers="b")
    new, of_b, of_a = line.asks(), line.asks(prefers="b"), line.asks(prefers="a")
    await asyncio.sleep(0)
    line.router.release(on_a)
    assert (await of_a).instance == "a", "although it came last"
    line.router.release(await of_a)
    assert (await new).instance == "a", "before a session of another engine"
    line.router.release(await new)
    assert (await of_b).instance == "a", "which goes elsewhere rather than leave it idle"
    line.router.release(on_b)


async def test_a_session_waits_for_its_own_engine_for_a_moment_and_no_longer() -> None:
    line = Line(rules=ChoiceRules(patience_s=0.05))
    line.says("a", load=load(limit=1))
    line.says("b", load=load(limit=1))
    out = await line.pick(prefers="a")
    patient = line.asks(prefers="a")
    await asyncio.sleep(0)
    assert not patient.done()
    line.router.release(out)
    assert (await patient).instance == "a"
    assert (await line.pick(prefers="a")).instance == "b", "nothing else happened meanwhile"


async def test_who_is_cancelled_takes_no_place_with_it() -> None:
    line = Line()
    line.says("a", load=load(limit=1))
    out = await line.pick()
    waiting = [line.asks() for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    line.router.release(out)  # gives the place to the second
    waiting[1].cancel()  # which is cancelled before it knows
    assert (await waiting[2]).instance == "a"
    assert line.router.demand == 1


async def test_shares_follow_what_workers_ask_for_and_who_drains_asks_for_nothing() -> None:
    workers = Present("rollout")
    line = Line(workers)
    line.says("a", load=load(limit=8))
    workers.says("rollout-0", demand=100)
    workers.says("rollout-1", demand=100)
    line.router.notify()
    refs = [await line.pick() for _ in range(4)]
    waiting = [line.asks() for _ in range(4)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    workers.says("rollout-1", state="draining", demand=100)
    line.router.notify()
    await asyncio.gather(*waiting)
    assert len(refs) + len(waiting) == 8


async def test_what_is_asked_of_another_policys_engines_takes_no_share_of_these() -> None:
    workers = Present("rollout")
    line = Line(workers, asks="demand-solver")
    line.says("a", load=load(limit=8))
    workers.says("rollout-0", **{"demand": 1, "demand-solver": 100})
    workers.says("rollout-1", **{"demand": 100, "demand-solver": 1})
    line.router.notify()
    refs = [await line.pick() for _ in range(7)]
    waiting = line.asks()
    await asyncio.sleep(0)
    assert len(refs) == 7 and not waiting.done(), "the other one asks for one place"
    waiting.cancel()


async def test_who_has_no_share_anywhere_still_has_one_place() -> None:
    workers = Present("rollout")
    for index in range(9):
        workers.says(f"rollout-{index}", demand=10)
    line = Line(workers)
    line.says("a", load=load(limit=2))
    await line.pick()
    waiting = line.asks()
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_a_tripped_engine_is_left_out_probed_once_and_comes_back() -> None:
    line = Line(breaker=SOON)
    line.says("a")
    bad = await line.pick()
    for _ in range(2):
        line.router.failed(bad, EngineFailedError("u", 503, ""))
    line.router.failed(bad, TimeoutError())
    line.router.release(bad)
    probe, second = line.asks(), line.asks()
    ref = await probe
    await asyncio.sleep(0)
    assert not second.done(), "one probe at a time"
    line.router.served(ref, 5)
    line.router.release(ref)
    await second


async def test_an_engine_that_refuses_connections_is_named_when_nobody_else_comes() -> None:
    line = Line(breaker=BreakerPolicy(base_s=60.0, max_s=60.0))
    line.says("a")
    ref = await line.pick()
    line.router.failed(ref, ConnectionRefusedError())
    line.router.release(ref)
    with pytest.raises(NoEngineError, match=r"a is ready \(its breaker is open\)"):
        await line.pick(0.01)
    line.says("a", started_at=9.0)
    assert (await line.pick()).instance == "a", "a new actor begins anew"


async def test_other_weights_than_announced_are_waited_out_until_its_next_word() -> None:
    line = Line()
    line.says("a", version="policy@1.7")
    ref = await line.pick(number=7)
    line.router.failed(ref, OffPinError("other weights"))
    line.router.release(ref)
    again = line.asks(number=7)
    await asyncio.sleep(0)
    assert not again.done()
    line.says("a", version="policy@1.7")
    await again


async def test_engines_that_hold_more_get_more() -> None:
    line = Line()
    line.says("small", load=load(capacity=100_000))
    line.says("large", load=load(capacity=300_000))
    refs = [(await line.pick()).instance for _ in range(40)]
    assert refs.count("large") == 30


async def test_an_engine_that_left_is_forgotten_and_its_requests_are_still_given_back() -> None:
    line = Line()
    line.says("a")
    ref = await line.pick()
    line.engines.beats.clear()
    line.router.notify()
    line.router.failed(ref, ConnectionRefusedError())
    line.router.release(ref)
    assert line.router.demand == 0


async def test_a_router_in_front_gets_what_any_engine_may_answer_and_is_passed_by_while_it_fails() -> None:
    line = Line(front="http://front", breaker=BreakerPolicy(base_s=60.0, max_s=60.0))
    line.says("a", version="policy@1.7", load=load(limit=9))
    line.says("b", version="policy@1.6", load=load(limit=9))
    ref = await line.pick()
    assert (ref.url, ref.through, ref.version) == ("http://front", True, "policy@1.6"), "the oldest that may answer"
    assert (await line.pick(number=7)).url == "http://a"
    line.router.failed(ref, ConnectionRefusedError())
    line.router.release(ref)
    direct = await line.pick()
    assert direct.url in ("http://a", "http://b") and not direct.through


async def test_a_router_in_front_does_not_lift_the_limits() -> None:
    line = Line(front="http://front")
    line.says("a", load=load(limit=1))
    ref = await line.pick()
    waiting = line.asks()
    await asyncio.sleep(0)
    assert not waiting.done()
    line.router.release(ref)
    await waiting
