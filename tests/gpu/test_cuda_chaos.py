"""kill -9 of engine, trainer and checkpoint service on GPUs: each comes back, their memory is freed, the account closes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from quickstart_run import ROOT, QuickstartRun

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 70
EACH = {8: "policy-0", 16: "checkpoint-0", 24: "trainer-0"}
"""By step."""
THREE_TRAINERS = EACH | {36: "trainer-0", 48: "trainer-0"}
"""Engines must accept the next one's versions each time, also where a group of broadcasts is formed anew."""
CARDS = {
    "one-card-ipc": (1, EACH, ("engines.policy.transport=ipc",)),
    "two-cards-nccl": (
        2,
        THREE_TRAINERS,
        ("engines.policy.transport=nccl", "engines.policy.gpus=[1]", "run.share_gpus=false"),
    ),
}


SLACK_MIB = 64


def _used_mib() -> int:
    """Memory in use on the devices that this test may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = ["-i", visible] if visible else []
    command = ["nvidia-smi", *only, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return sum(int(line) for line in found.stdout.split())


@pytest.mark.timeout(580)
@pytest.mark.parametrize("cards", CARDS)
def test_killed_actors_come_back_free_their_memory_and_lose_nothing(tmp_path: Path, cards: str) -> None:
    count, victims, settings = CARDS[cards]
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
    path = os.environ.get("PYTHONPATH", "")
    run = QuickstartRun(
        tmp_path,
        "gpu-kills",
        f"stop.steps={STEPS}",
        "evaluation.problems=32",
        *settings,
        *([f"engines.policy.env.PYTHONPATH={path}"] if path else []),
        config=ROOT / "configs" / "h200_calculator.yaml",
    )
    killed: list[int] = []

    def kill_due(step: int) -> None:
        if step in victims and step not in killed:
            killed.append(step)
            run.kill(victims[step])

    before = _used_mib()
    try:
        status = run.read(kill_due)
    finally:
        run.end()
    assert status == 0, run.output[-6000:]
    assert killed == list(victims)
    if not os.environ.get("PHYSARUM_TEST_SHARED_GPUS"):  # set where others use these devices meanwhile
        assert _used_mib() <= before + SLACK_MIB, "what was started here holds memory of a device"
    summary = run.summary
    account = summary["account"]
    assert (account["imbalance"], account["double_trained"], account["dead"]) == (0, 0, 0)
    assert (summary["steps"], summary["max_trained_age"] <= summary["age_bound"]) == (STEPS, True)
