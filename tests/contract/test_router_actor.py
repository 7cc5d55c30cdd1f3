"""A router that is started here knows the engines that take requests, and rollout actors find it; without it they go on."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from actor_fixture import eventually, make_context, running
from aiohttp import web
from bus_fixture import DEADLINE_S
from test_fault_rollout import ASKING, StubEngine, actor, issue, ordinals
from test_rollout_fleet import Presence

from physarum.actors.errors import UnrecoverableError
from physarum.actors.router.actor import RouterActor, group_of
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)
STUB = Path(__file__).resolve().parent.parent / "stub_engine"


def settings(**router: str) -> list[str]:
    text = ", ".join(f"{name}: {value}" for name, value in router.items())
    return [
        f"engines.policy.python={sys.executable}",
        f"engines.policy.env={{PYTHONPATH: {STUB}}}",
        f"engines.policy.start_router={{{text}}}",
    ]


def router_actor(folder: Path, bus: Bus, publisher: Publisher, *overrides: str) -> RouterActor:
    context = make_context(folder, bus, publisher, "router", *overrides, instance="router-policy-0")
    return RouterActor(context)


async def workers_of(router: RouterActor) -> set[str]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{router.facts['url']}/workers", timeout=timeout) as answer,
    ):
        return {one["url"] for one in (await answer.json())["workers"]}


async def test_the_router_is_told_of_engines_as_they_come_and_go(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    presence = Presence(bus, publisher)
    router = router_actor(tmp_path, bus, publisher, *settings(policy="round_robin"))
    async with running(router):
        await eventually(lambda: router.state == "waiting for engines")
        await presence.engine("policy-0", 1001)
        await presence.engine("policy-1", 1002, "draining")
        await eventually(lambda: router.state == "ready")
        assert await workers_of(router) == {"http://127.0.0.1:1001"}
        await presence.engine("policy-1", 1003)
        await eventually(lambda: router.numbers["engines"] == 2)
        await presence.engine("policy-0", 1001, "unreachable")
        await eventually(lambda: router.numbers["engines"] == 1)
        assert await workers_of(router) == {"http://127.0.0.1:1003"}


class Asked(StubEngine):
    """Counts the requests that came through a router."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: Counter[bool] = Counter()

    async def says(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.ways["X-Through" in request.headers] += 1
        return await super().says(request, body)


async def test_rollout_actors_ask_through_it_and_directly_when_it_is_gone(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    presence, engine = Presence(bus, publisher), Asked()
    router = router_actor(tmp_path, bus, publisher, *settings())
    async with engine.serving() as port:
        await presence.engine("policy-0", port)
        async with running(router):
            await eventually(lambda: router.state == "ready")
            await presence.says("router", "router-policy-0", "ready", 1.0, router.facts)
            made = actor(tmp_path, bus, publisher, *ASKING, *settings())
            await issue(made, ["ask"] * 6)
            async with running(made):
                assert await ordinals(bus, 6) == Counter(range(6))
        assert engine.ways == {True: 6}
        made = actor(tmp_path, bus, publisher, *ASKING, *settings())
        await presence.engine("policy-0", port)
        await presence.says("router", "router-policy-0", "ready", 1.0, router.facts)  # killed: nobody takes it back
        await issue(made, ["ask"] * 6, start=6)
        async with running(made):
            assert await ordinals(bus, 12) == Counter(range(12))
    assert engine.ways[False] == 6


async def test_an_unknown_argument_and_a_missing_package_are_named(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    wrong = router_actor(tmp_path, bus, publisher, *settings(polici="random"))
    with pytest.raises(UnrecoverableError, match=r"no argument polici; did you mean policy\?"):
        await wrong.run()
    bare = [setting for setting in settings() if "env" not in setting]
    absent = router_actor(tmp_path, bus, publisher, *bare)
    with pytest.raises(UnrecoverableError, match="install sglang-router there"):
        await absent.run()


def test_the_group_is_in_the_name() -> None:
    assert group_of("router-a-router-0") == "a-router"
