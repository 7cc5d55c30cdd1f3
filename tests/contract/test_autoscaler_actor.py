"""The autoscaler on a real bus: engines that say they are full are more, unless it only looks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actor_fixture import make_context, register_until, running
from bus_fixture import DEADLINE_S

from physarum.actors import states
from physarum.actors.autoscaler.actor import AutoscalerActor
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
