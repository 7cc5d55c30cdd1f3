"""Nodes of one engine: an attempt begins when nobody of an earlier one is left, and ends with the first node that leaves it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors.context import Identity
from physarum.actors.engine.actor import EngineActor
from physarum.actors.engine.nodes import Nodes, Rendezvous, engine_of, name_of, node_arguments
from physarum.actors.errors import ActorError
from physarum.actors.node.actor import NodeActor
from physarum.bus.presence import Heartbeat
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"

pytestmark = pytest.mark.timeout(20)


class Present:
    """A roster as the engine reads it."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.changed = asyncio.Event()

    @property
    def members(self) -> list[Heartbeat]:
        return list(self.beats.values())

    def says(self, name: str, attempt: str = "", host: str = "here") -> None:
        facts: dict[str, Any] = {"attempt": attempt}
        self.beats[name] = Heartbeat(
            role="node", instance=name, state="", pid=1, host=host, started_at=0.0, sequence=1, facts=facts
        )
        self.changed.set()

    def goes(self, name: str) -> None:
        del self.beats[name]
        self.changed.set()

    def nodes(self, count: int = 3) -> Nodes:
        return Nodes(self, self.changed, "policy-0", count, "here")  # type: ignore[arg-type]  # what it uses of a roster


async def met(present: Present) -> tuple[Nodes, Rendezvous]:
    nodes = present.nodes()
    present.says("policy-0-node-1")
    present.says("policy-0-node-2")
    return nodes, await nodes.meet(5)


async def test_an_attempt_begins_when_all_are_there_and_free() -> None:
    present = Present()
    nodes = present.nodes()
    meeting = asyncio.create_task(nodes.meet(10))
    present.says("policy-0-node-1")
    present.says("policy-0-node-2", attempt="of before")
    present.says("policy-1-node-2")
    await asyncio.sleep(0.02)
    assert not meeting.done()
    present.says("policy-0-node-2")
    assert (await meeting).address.startswith("127.0.0.1:")
    nodes.close()


async def test_nodes_on_other_hosts_are_told_a_host_they_can_reach() -> None:
    present = Present()
    present.says("policy-0-node-1", host="elsewhere")
    nodes = present.nodes(2)
    assert (await nodes.meet(5)).address.startswith("here:")
    nodes.close()


async def test_who_does_not_come_is_named() -> None:
    present = Present()
    present.says("policy-0-node-1")
    with pytest.raises(ActorError, match="policy-0-node-2 did not wait for it within 0.05 s"):
        await present.nodes().meet(0.05)


@pytest.mark.parametrize("how", ["goes", "restarts"])
async def test_the_first_node_that_leaves_the_attempt_ends_it(how: str) -> None:
    present = Present()
    nodes, meeting = await met(present)
    lost = asyncio.create_task(nodes.lost())
    for name in ("policy-0-node-1", "policy-0-node-2"):
        present.says(name, meeting.attempt)
        await asyncio.sleep(0.01)
    assert not lost.done()
    present.goes("policy-0-node-2") if how == "goes" else present.says("policy-0-node-2")
    assert await lost == "policy-0-node-2"
    nodes.close()


async def test_a_node_that_has_not_joined_yet_is_not_lost() -> None:
    present = Present()
    nodes, meeting = await met(present)
    lost = asyncio.create_task(nodes.lost())
    present.says("policy-0-node-1", meeting.attempt)
    await asyncio.sleep(0.02)
    assert not lost.done()
    lost.cancel()
    nodes.close()


def test_names_and_arguments() -> None:
    assert name_of("a-node-0", 2) == "a-node-0-node-2" and engine_of("a-node-0-node-2") == ("a-node-0", 2)
    assert node_arguments(2, 1, "h:5") == {"nnodes": 2, "node-rank": 1, "dist-init-addr": "h:5"}
    with pytest.raises(ValueError, match="is no node of an engine"):
        engine_of("policy-0")


def node_of(*settings: str) -> NodeActor:
    """`policy-0-node-1`, whose engine announces attempt `a`, and which takes part in it."""
    context = SimpleNamespace(
        config=resolve(RECIPE, parse_command_line(["engines.policy.nodes=2", *settings])),
        identity=Identity("run", "node", "policy-0-node-1"), bus=None, publisher=None, host="here",
        folder=SimpleNamespace(logs=Path("logs"), start_model=Path("model")),
    )  # fmt: skip
    node = NodeActor(context)  # type: ignore[arg-type]  # what it uses of a context
    node._engine, node._rank, node._group = "policy-0", 1, "policy"
    node._settings = context.config.engines["policy"].of_server(0)
    node._part, node._changed = node._settings.part_of(0), asyncio.Event()
    meeting = {"address": "h:5", "attempt": "a"}
    engine = Heartbeat(
        role="engine", instance="policy-0", state="ready", pid=1, host="here", started_at=0.0, sequence=1,
        facts={"rendezvous": meeting},
    )  # fmt: skip
    node._engines = SimpleNamespace(members=[engine])  # type: ignore[assignment]
    return node


def test_every_node_of_an_engine_reports_the_routing_that_is_replayed() -> None:
    """Ranks that capture and ranks that do not would not be one engine."""
    spec = node_of("trainer.algorithm.replay.routing=R3")._spec(Rendezvous(address="h:5", attempt="a"))
    assert spec.sglang["enable-return-routed-experts"] is True and spec.nodes["node-rank"] == 1
    assert "enable-return-routed-experts" not in node_of()._spec(Rendezvous(address="h:5", attempt="a")).sglang


class Server:
    """An encoder's, which goes on."""

    url = announced = "http://h:1"
    pid, bootstrap_port = 1, None

    async def wait_exit(self) -> int:
        await asyncio.Event().wait()
        return 0


async def test_an_encoder_over_several_nodes_ends_with_the_first_that_is_lost() -> None:
    """Its server may wait for the others for ever, while everybody sends it images."""
    context = SimpleNamespace(
        config=resolve(RECIPE, parse_command_line(["engines.policy.nodes=2"])), draining=asyncio.Event(), paused=False,
        identity=Identity("run", "engine", "policy-0"), bus=None, publisher=None, host="here",
    )  # fmt: skip
    engine = EngineActor(context)  # type: ignore[arg-type]  # what it uses of a context
    engine._settings = context.config.engines["policy"].of_server(0)
    lost = asyncio.get_running_loop().create_future()

    async def lose() -> None:
        raise ActorError(f"{await lost} has left the engine")

    engine._lost = asyncio.create_task(lose())
    encoding = asyncio.create_task(engine._encode(Server()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not encoding.done()
    lost.set_result("policy-0-node-1")
    with pytest.raises(ActorError, match="policy-0-node-1 has left the engine"):
        await asyncio.wait_for(encoding, 5)


async def test_a_node_that_is_scaled_away_stays_until_its_engine_has_handed_over() -> None:
    node = node_of()
    serving = asyncio.create_task(asyncio.Event().wait())
    leaving = asyncio.create_task(node._outlive("a", serving))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    assert not leaving.done(), "its engine still answers requests with it"
    node._engines.members.clear()
    node._changed.set()
    await asyncio.wait_for(leaving, 5)
    serving.cancel()
