"""`actorctl eval`: a model is scored on sets of a run's evaluation, each by its own means, and nothing is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from physarum.agents.calculator.model import build

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stub_engine"


def configuration(folder: Path) -> dict[str, Any]:
    build(folder / "model", seed=0)
    (folder / "held_out.jsonl").write_text(
        "".join(json.dumps({"q": f"{n}+1", "label": str(n + 1)}) + "\n" for n in range(5))
    )
    hooks = folder / "judging.py"
    hooks.write_text(
        "def half(execution):\n    assert isinstance(execution.samples[-1].outputs['text'], str)\n"
        "    return float(execution.task.member % 2)\n\n\ndef one(execution, *, value):\n    return value\n"
    )
    sets = {
        "halves": {"data": "held_out.jsonl", "samples": 4, "pass_at": [1, 2, 4], "columns": {"prompt": "q"}},
        "judged": {
            "hook": "physarum.agents.calculator.problems:HeldOut", "problems": 3,
            "reward": {"hook": f"{hooks}:one", "args": {"value": 0.25}},
            "generate": {"hook": "physarum.agents.calculator.episode:generate"},
        },
    }  # fmt: skip
    return {
        "run": {"name": "trained"},
        "model": {"path": str(folder / "model")},
        "source": {"hook": "physarum.agents.calculator.problems:Problems"},
        "rollout": {"generate": "physarum.agents.single_turn:generate", "sampling": {"max_new_tokens": 16}},
        "reward": {"hook": f"{hooks}:half"},
        "engines": {
            name: {"python": sys.executable, "env": {"PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}"}}
            for name in ("policy", "aside")
        },
        "evaluation": {"sets": sets, "engines": "aside", "sampling": {"max_new_tokens": 16}},
        "trainer": {"objective": "rl", "lr": 1e-3, "tokens_per_microbatch": 2048},
        "stop": {"steps": 1000},
    }


def actorctl(folder: Path, *words: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "physarum.actors.actorctl", *words, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_model_is_scored_on_every_set_and_the_scores_stay(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(tmp_path)))
    summary = actorctl(tmp_path, "eval", "run.yaml", "--model", str(tmp_path / "model"))
    assert (summary["reward_start"], summary["steps"]) == (pytest.approx((0.5 + 0.25) / 2), 0)
    assert summary["account"]["issued"] == 0
    (found,) = actorctl(tmp_path, "evals", "trained-eval")["evaluations"]
    halves, judged = found["sets"]["halves"], found["sets"]["judged"]
    assert (halves["score"], halves["problems"], halves["samples"], halves["scored"]) == (0.5, 5, 4, 20)
    assert halves["pass_at"] == {"1": 0.5, "2": pytest.approx(1 - 1 / 6), "4": 1.0}
    assert (judged["score"], judged["problems"], judged["off_version"]) == (0.25, 3, 0)
