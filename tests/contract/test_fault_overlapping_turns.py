"""Two turns of one session overlap, and both are judged, each with its own continuation: turns are executions with ids of
their own, and no judge keeps "the session's current turn"."""

from __future__ import annotations

import os
from pathlib import Path

from actor_fixture import running
from test_reward_actor import execution, nothing_left, reward_context, scored

from physarum.actors.reward.actor import RewardActor
from physarum.actors.wire import publish_execution
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher


async def test_both_of_two_overlapping_turns_are_judged(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    os.mkfifo(tmp_path / "continuation")
    context = reward_context(
        tmp_path, bus, publisher, "reward.workers=2", f"reward.args.folder={tmp_path}", hook="judge_turn"
    )
    for turn in range(2):
        await publish_execution(context, "episodes", execution(bus.run, f"turn-{turn}", f"session 7 turn {turn}"))
    async with running(RewardActor(context)):
        found = await scored(context, 2)
    assert {prompt: one.samples[0].reward for prompt, one in found.items()} == {
        "session 7 turn 0": 3.0,
        "session 7 turn 1": 0.5,
    }
    await nothing_left(bus)
