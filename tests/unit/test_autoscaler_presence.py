"""What the autoscaler takes for an engine: not the nodes and routers of its group, which say the group's name as well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors import states
from physarum.actors.autoscaler import actor as module
from physarum.actors.autoscaler.actor import AutoscalerActor
from physarum.actors.autoscaler.policy import Policy
from physarum.actors.tools.errors import RunUnfitError
from physarum.bus.presence import Heartbeat
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

pytestmark = pytest.mark.timeout(20)

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def beat(role: str, instance: str, state: str = "ready", group: str = "", **numbers: float) -> Heartbeat:
    return Heartbeat(
        role=role, instance=instance, state=state, pid=1, host="h", started_at=1.0, sequence=1,
        facts={"group": group} if group else {}, numbers=numbers,
    )  # fmt: skip


class Scale:
    """The register of what was asked for."""

    def __init__(self) -> None:
        self.value: states.Scaled | None = states.Scaled({"policy": [0], "rollout": [0], "reward": [0]}, time.time())
        self.revision = 1

    async def get(self, *key: str) -> Scale:
        return self

    async def compare_and_set(self, value: states.Scaled, revision: int, *key: str) -> None:
        self.value = value


@pytest.fixture
def scale() -> Scale:
    return Scale()


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch, scale: Scale) -> AutoscalerActor:
    async def nothing(bus: Any, name: str) -> Any:
        return SimpleNamespace(messages=0)

    async def recorded(*of: Any, **more: Any) -> None: ...

    monkeypatch.setattr(module.log, "state", nothing)
    monkeypatch.setattr(module.cordons, "record", recorded)
    group = "{least: 0, most: 4, up_after_s: 0.001, down_after_s: 0.001}"
    config = resolve(RECIPE, parse_command_line([f"autoscale.groups.policy={group}", "autoscale.dry_run=false"]))
    context: Any = SimpleNamespace(config=config, bus=None, publisher=None, run_register=lambda kind: scale)
    made = AutoscalerActor(context)
    made._settings, made._said, made._begun = config.autoscale, {}, True  # type: ignore[assignment]
    made._policies = {name: Policy(one) for name, one in made._settings.groups.items()}
    return made


async def looks(autoscaler: AutoscalerActor, *beats: Heartbeat) -> None:
    for _ in range(2):
        await autoscaler._look(list(beats))
        await asyncio.sleep(0.002)


async def test_a_group_without_engines_grows_although_its_router_and_nodes_are_there(
    autoscaler: AutoscalerActor, scale: Scale
) -> None:
    assert scale.value is not None
    scale.value.groups["policy"] = []
    waits = beat("rollout", "rollout-0", waiting=3.0, running=3.0)
    router, node = beat("router", "router-policy-0", group="policy"), beat("node", "policy-0-node-1", group="policy")
    await looks(autoscaler, waits, router, node)
    assert scale.value.groups["policy"] == [0], "episodes wait, and nobody is there to take them"


async def test_pairs_that_take_a_version_do_not_begin_the_wait_for_a_change_anew(
    autoscaler: AutoscalerActor, scale: Scale
) -> None:
    idle = beat("engine", "policy-0", group="policy", kv_usage=0.0)
    await autoscaler._look([idle])
    since = autoscaler._policies["policy"]._since
    await autoscaler._look([beat("engine", "policy-0", "handing over", "policy", kv_usage=0.0)])
    assert autoscaler._policies["policy"]._since == since
    await asyncio.sleep(0.002)
    await autoscaler._look([idle])
    assert scale.value is not None and scale.value.groups["policy"] == []


async def test_an_engine_on_trial_does_not_begin_the_wait_for_a_change_anew(
    autoscaler: AutoscalerActor, scale: Scale
) -> None:
    """With a canary for each version a group that is pressed all the time never grew."""
    assert scale.value is not None
    scale.value.groups["policy"] = [0, 1]

    async def since(state: str) -> float:
        first = beat("engine", "policy-0", group="policy", kv_usage=0.99, waiting=5)
        await autoscaler._look([first, beat("engine", "policy-1", state, "policy", kv_usage=0.99, waiting=5)])
        return autoscaler._policies["policy"]._since

    assert await since("ready") == await since("canary")
    assert await since("ready") < await since("starting"), "one that is missing does"


async def test_a_size_that_cannot_be_ends_no_autoscaler(autoscaler: AutoscalerActor, scale: Scale) -> None:
    """What was drained by hand may leave a group that no rule foresaw: it stays as it is, and the run goes on."""
    looked = asyncio.Event()

    async def look(beats: list[Heartbeat]) -> None:
        looked.set()
        raise RunUnfitError("policy would have 1 actors; expected at least 2")

    async def changes(timeout_s: float) -> bool:
        return True

    autoscaler._look = look  # type: ignore[method-assign]
    autoscaler.context.resumed = asyncio.Event()
    autoscaler.context.resumed.set()
    watching = asyncio.create_task(autoscaler._looking(SimpleNamespace(wait_change=changes, members=[])))  # type: ignore[arg-type]
    await asyncio.wait_for(looked.wait(), 5)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
