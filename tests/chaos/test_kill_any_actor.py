"""kill -9 of each actor of a running quick start: it comes back, and the account still closes."""

from __future__ import annotations

from pathlib import Path

import pytest
from quickstart_run import QuickstartRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = 20
BATCH = 16 * 8
VICTIMS = {
    2: "rollout-0",
    4: "reward-0",
    6: "source-0",
    8: "checkpoint-0",
    10: "janitor-0",
    11: "trainer-0",
    14: "policy-0",
    16: "rollout-1",
}


def test_killing_each_actor_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    run = QuickstartRun(tmp_path, "kills", f"stop.steps={STEPS}", "evaluation.problems=32")
    killed: list[str] = []

    def kill_due(step: int) -> None:
        victim = VICTIMS.get(step)
        if victim is not None and victim not in killed:
            run.kill(victim)
            killed.append(victim)

    try:
        status = run.read(kill_due)
    finally:
        run.end()
    assert status == 0, run.output[-6000:]
    assert sorted(killed) == sorted(VICTIMS.values())
    account = run.summary["account"]
    assert account["imbalance"] == 0
    assert account["double_trained"] == 0
    # Tokens of the epoch that the trainer's death ended are as old as its last checkpoint: some batches may be masked
    # whole, and are then steps that change no weights.
    disposed = account["trained"] + account["masked"] + account["dropped"]
    assert disposed >= STEPS * BATCH
    assert disposed % BATCH == 0
    assert account["dead"] == 0
    assert run.summary["steps"] == STEPS
    assert run.summary["max_trained_age"] <= run.summary["age_bound"]
