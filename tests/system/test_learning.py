"""Each algorithm learns the quick start's task, on real engine, trainer and bus (GRPO itself: test_quickstart.py).

Slow: one run of the quick start, smaller, for each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from quickstart_run import QuickstartRun

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(900)]

STEPS = 30
REACHED = 0.6
ALGORITHMS = {
    "gspo": "{loss: gspo, clip_low: 3.0e-4, clip_high: 4.0e-4, reduction: sequence, minibatches: 2}",
    "cispo": "{loss: cispo, clip_low: 1.0, clip_high: 4.0, old_logprobs: engine, correction: none}",
    "reinforce": "{advantage: reinforce++}",
    "ppo": "{advantage: gae, critic: {lr: 1.0e-3}}",
    "decoupled": "{old_logprobs: interpolate, correction: [{kind: mis, low: 0.2, high: {by_age: [5.0, 4.0, 3.0]}}]}",
}


def trained(folder: Path, name: str, *overrides: str) -> QuickstartRun:
    run = QuickstartRun(folder, name, f"stop.steps={STEPS}", "evaluation.problems=128", *overrides)
    try:
        assert run.read() == 0, run.output[-4000:]
    finally:
        run.end()
    account = run.summary["account"]
    assert (account["imbalance"], account["double_trained"], account["dead"]) == (0, 0, 0)
    return run


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reward_rises_with(tmp_path: Path, algorithm: str) -> None:
    run = trained(tmp_path, algorithm, f"trainer.algorithm={ALGORITHMS[algorithm]}")
    assert run.summary["reward_start"] < 0.35
    assert run.summary["reward_end"] > REACHED


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What GRPO made of the start model."""
    run = trained(tmp_path_factory.mktemp("teacher"), "teacher")
    assert run.summary["reward_end"] > REACHED
    return Path(run.summary["model_dir"])


def test_the_reward_rises_by_distillation_alone(tmp_path: Path, teacher: Path) -> None:
    """On-policy distillation never sees a reward: the teacher's opinion of the student's tokens is all it has."""
    algorithm = f"{{advantage: distillation, teachers: {{good: {{model: {teacher}}}}}}}"
    run = trained(tmp_path, "student", f"trainer.algorithm={algorithm}")
    assert run.summary["reward_start"] < 0.35
    assert run.summary["reward_end"] > REACHED
