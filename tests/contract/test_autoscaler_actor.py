"""The autoscaler on a real bus: engines that say they are full are more, unless it only looks."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest
from actor_fixture import make_context, register_until, running
from bus_fixture import DEADLINE_S

from physarum.actors import cordons, states
from physarum.actors.autoscaler.actor import AutoscalerActor
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.crew import drain
from physarum.bus.connection import Bus
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

pytestmark = pytest.mark.timeout(60)

SETTINGS = ("autoscale.groups.policy={most: 4, up_after_s: 0.05, step: 1.0}", "supervisor.heartbeat_s=0.05")


def full_engine(sequence: int) -> Heartbeat:
    return Heartbeat(
        role="engine", instance="policy-0", state="ready", pid=1, host="h", started_at=1.0, sequence=sequence,
        facts={"group": "policy", "version": "policy@1.0"}, numbers={"kv_usage": 0.97, "waiting": 4.0},
    )  # fmt: skip


async def heartbeats(bus: Bus, publisher: Publisher) -> None:
    """Of one engine, until cancelled."""
    sequence = 1
    while True:
        await announce(bus, publisher, full_engine(sequence))
        sequence += 1
        await asyncio.sleep(0.05)


async def test_a_full_group_is_asked_to_grow_once_and_then_waits_for_who_is_missing(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = make_context(tmp_path, bus, publisher, "autoscaler", *SETTINGS, "autoscale.dry_run=false")
    register = Register(bus, publisher, "run", states.Scaled)
    actor = AutoscalerActor(context)
    beats = asyncio.create_task(heartbeats(bus, publisher))
    try:
        async with running(actor):
            scaled = await register_until(register, lambda value: True, states.SCALE)
            assert scaled.groups == {"rollout": [0], "reward": [0], "policy": [0, 1]}
            looked = actor.numbers["looks"]
            async with asyncio.timeout(DEADLINE_S):
                while actor.numbers["looks"] < looked + 5:
                    await asyncio.sleep(0.02)
            assert (await register.get(states.SCALE)).value == scaled, "policy-1 is not there yet"
    finally:
        beats.cancel()


async def test_a_dry_run_says_so_and_asks_for_nothing(
    tmp_path: Path, bus: Bus, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    context = make_context(tmp_path, bus, publisher, "autoscaler", *SETTINGS)
    actor = AutoscalerActor(context)
    beats = asyncio.create_task(heartbeats(bus, publisher))
    try:
        async with running(actor), asyncio.timeout(DEADLINE_S):
            while actor.numbers.get("policy_wanted") != 2:
                await asyncio.sleep(0.02)
    finally:
        beats.cancel()
    assert "policy is pressed: it would be scaled from 1 to 2" in caplog.text
    assert (await Register(bus, publisher, "run", states.Scaled).get(states.SCALE)).value is None


class Crowd:
    """Heartbeats of whoever is there, until the block ends; `there` may be changed meanwhile."""

    def __init__(self, bus: Bus, publisher: Publisher, *there: Heartbeat) -> None:
        self._bus, self._publisher, self.there = bus, publisher, list(there)

    async def _beat(self) -> None:
        for sequence in itertools.count(1):
            for one in self.there:
                await announce(self._bus, self._publisher, msgspec.structs.replace(one, sequence=sequence))
            await asyncio.sleep(0.05)

    async def __aenter__(self) -> Crowd:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


def member(role: str, instance: str, **numbers: float) -> Heartbeat:
    facts = {"group": instance.rpartition("-")[0], "version": "policy@1.0"} if role == "engine" else {}
    return Heartbeat(
        role=role, instance=instance, state="ready", pid=1, host="h", started_at=1.0, sequence=1, facts=facts, numbers=numbers
    )  # fmt: skip


EVALUATED = (
    "engines.evals={}", "evaluation.engines=evals", "evaluation.hook=physarum.agents.calculator.problems:Problems",
    "supervisor.heartbeat_s=0.02", "autoscale.dry_run=false",
)  # fmt: skip


async def looked(actor: AutoscalerActor, times: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        before = actor.numbers.get("looks", 0)
        while actor.numbers.get("looks", 0) < before + times:
            await asyncio.sleep(0.01)


async def test_engines_kept_for_evaluations_grow_by_who_waits_for_them_and_the_policys_by_theirs(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """An evaluation's requests wait in the workers, apart from training's: neither group grows for the other's."""
    groups = "autoscale.groups={policy: {most: 4, up_after_s: 0.05}, evals: {most: 4, up_after_s: 0.05}}"
    actor = AutoscalerActor(make_context(tmp_path, bus, publisher, "autoscaler", *EVALUATED, groups))
    register = Register(bus, publisher, "run", states.Scaled)
    there = [
        member("engine", "policy-0", kv_usage=0.6),
        member("engine", "evals-0", kv_usage=0.6),
        member("rollout", "rollout-0", evaluating_waiting=9, waiting=0),
    ]
    async with Crowd(bus, publisher, *there), running(actor):
        scaled = await register_until(register, lambda value: True, states.SCALE)
        assert scaled.groups["evals"] == [0, 1] and scaled.groups["policy"] == [0]
        await looked(actor, 5)
        assert (await register.get(states.SCALE)).value == scaled, "evals-1 is not there yet"


async def test_what_training_needs_is_not_taken_away_while_the_start_model_is_evaluated(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    groups = "autoscale.groups={policy: {most: 4, down_after_s: 0.05}, evals: {most: 4, down_after_s: 0.05}}"
    counts = ("engines.policy.count=2", "engines.evals.count=2")
    context = make_context(tmp_path, bus, publisher, "autoscaler", *EVALUATED, groups, *counts)
    register = Register(bus, publisher, "run", states.Scaled)
    there = [member("engine", f"{name}-{one}", kv_usage=0.0) for name in ("policy", "evals") for one in range(2)]
    actor = AutoscalerActor(context)
    await cordons.record(bus, publisher, more=["evals-1", "evals-0"])
    async with Crowd(bus, publisher, *there) as crowd, running(actor):
        scaled = await register_until(register, lambda value: True, states.SCALE)
        cordoned = Register(bus, publisher, "run", states.Cordoned)
        await register_until(cordoned, lambda value: value.instances == {"evals-0"}, states.CORDONED)
        assert scaled.groups["evals"] == [0] and scaled.groups["policy"] == [0, 1]
        crowd.there = [one for one in there if one.instance != "evals-1"]
        await looked(actor, 10)
        assert (await register.get(states.SCALE)).value == scaled
        score = states.EvalScore(
            version="policy@1.0", score=0.5, problems=1, scored=1, off_version=0, started_at=1.0, finished_at=2.0
        )  # fmt: skip
        await Register(bus, publisher, "run", states.EvalScore).put(score, states.EVAL_START)
        await register_until(register, lambda value: value.groups["policy"] == [0], states.SCALE)


async def test_an_engine_that_is_drained_by_hand_leaves_and_the_others_keep_their_names(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """The autoscaler goes on from what is left, of that group alone."""
    groups = "autoscale.groups={policy: {most: 4, up_after_s: 0.05, step: 0.1}, evals: {most: 2, up_after_s: 0.05}}"
    counts = ("engines.policy.count=3", "engines.evals.count=2")
    context = make_context(tmp_path, bus, publisher, "autoscaler", *EVALUATED, groups, *counts)
    run = OpenRun(context.folder, context.config, bus, publisher, live=True)
    assert (await drain(run, "policy-1"))["policy"] == [0, 2]
    assert (await drain(run, "evals-0"))["evals"] == [1]
    there = [member("engine", f"policy-{one}", kv_usage=0.6) for one in (0, 2)] + [
        member("engine", "evals-1", kv_usage=0.6)
    ]
    actor = AutoscalerActor(context)
    async with Crowd(bus, publisher, *there) as crowd, running(actor):
        await looked(actor, 10)
        register = Register(bus, publisher, "run", states.Scaled)
        assert (await register.get(states.SCALE)).value.groups == {  # type: ignore[union-attr]
            "rollout": [0], "reward": [0], "policy": [0, 2], "evals": [1],
        }  # fmt: skip
        crowd.there = [*there, member("rollout", "rollout-0", evaluating_waiting=3)]
        scaled = await register_until(register, lambda value: len(value.groups["evals"]) == 2, states.SCALE)
        assert scaled.groups["evals"] == [0, 1] and scaled.groups["policy"] == [0, 2]
