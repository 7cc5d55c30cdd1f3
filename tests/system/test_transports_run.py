"""Whole runs of real trainer and engine in which weights come through a device agent, and by broadcast from the trainer's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_run_learns_over(tmp_path: Path, transport: str) -> None:
    command = [
        sys.executable, "-m", "physarum.actors.actorctl", "up", str(ROOT / "configs" / "quickstart.yaml"),
        f"run.root={tmp_path}", f"engines.policy.transport={transport}", "stop.steps=12",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["account"]["imbalance"] == 0 and summary["steps"] == 12
    assert summary["reward_end"] > summary["reward_start"]
    updates = summary["weight_updates"]
    # The first version is there before the engine is; all others it gets by its own transport.
    assert updates.keys() <= {transport, "ipc"} and updates[transport] >= summary["versions"] - 3, updates
