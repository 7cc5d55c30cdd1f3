"""From one recorded sample log the real trainer comes to the same bits, however often it and its bus are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
STEPS = 24
# After these steps of the replay; checkpoints come every five, so plans are executed again from the one before.
TRAINER_DIES_AFTER = (4, 11, 18)
BUS_DIES_AFTER = 14
_STEP = re.compile(r"^stormy: step (\d+)/")


def actorctl(folder: Path, *arguments: str, on_line: Callable[[str], None] = lambda line: None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "physarum.actors.actorctl", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
    )  # fmt: skip
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        on_line(line)
    assert process.wait() == 0, "".join(lines[-40:])


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_the_trainers_weights_are_bit_equal_through_kills_of_trainer_and_bus(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    actorctl(
        tmp_path, "up", str(ROOT / "configs" / "calculator_copy.yaml"), "run.name=recorded", f"stop.steps={STEPS}",
        "stop.loss_below=null", "samples.keep=all", "trainer.checkpoint_every=5",
    )  # fmt: skip
    actorctl(tmp_path, "replay", "recorded", "--run", "calm")

    due = {*TRAINER_DIES_AFTER, BUS_DIES_AFTER}

    def strike(line: str) -> None:
        found = _STEP.match(line)
        if found is None or int(found[1]) not in due:
            return
        due.discard(int(found[1]))
        stormy = runs / "stormy"
        record = "bus/server.json" if int(found[1]) == BUS_DIES_AFTER else "actors/trainer-0.json"
        os.kill(int(json.loads((stormy / record).read_text())["pid"]), signal.SIGKILL)

    actorctl(tmp_path, "replay", "recorded", "--run", "stormy", on_line=strike)
    assert not due, f"no kill after steps {due}"
    assert weights(runs / "stormy") == weights(runs / "calm")
    start = (runs / "calm" / "start_model" / "model.safetensors").read_bytes()
    assert weights(runs / "calm") != start, "nothing was trained: equality would say nothing"
    account = json.loads((runs / "stormy" / "summary.json").read_text())["account"]
    assert (account["imbalance"], account["double_trained"]) == (0, 0)
