"""A whole run whose engines hold INT4 and whose trainer does not: every version takes the engines' form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.agents.calculator.model import build
from physarum.weightsync.layout import forms_in
from physarum.weightsync.quantisation.presets import preset
from physarum.weightsync.quantisation.reading import folder_tensors

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stub_engine"
STEPS = 4


def configuration(folder: Path) -> dict[str, Any]:
    build(folder / "plain", seed=0)
    write_hf_folder(folder / "plain", folder / "int4", folder_tensors(folder / "plain"), preset("int4"))
    hooks = ROOT / "tests" / "bench" / "chaos_hooks.py"
    engine = {"quantised_model": str(folder / "int4"), "python": sys.executable, "env": {"PYTHONPATH": str(STUB)}}
    return {
        "run": {"name": "int4"},
        "model": {"path": str(folder / "plain")},
        "source": {"name": "problems", "hook": "physarum.agents.calculator.problems:Problems", "group_size": 4},
        "rollout": {"generate": f"{hooks}:generate", "sampling": {"temperature": 1.0, "max_new_tokens": 40}},
        "reward": {"hook": f"{hooks}:even_share"},
        "engines": {"policy": engine},
        "trainer": {"objective": "rl", "lr": 1e-3, "groups_per_batch": 4, "tokens_per_microbatch": 2048},
        "age": {"bound": 2},
        "stop": {"steps": STEPS},
    }


def test_versions_take_the_form_of_the_engines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(tmp_path)))
    command = [sys.executable, "-m", "physarum.actors.actorctl", "up", "run.yaml", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "runs" / "int4" / "summary.json").read_text())
    assert (summary["steps"], summary["account"]["imbalance"]) == (STEPS, 0)
    assert sum(summary["weight_updates"].values()) >= 2, summary["weight_updates"]
    assert forms_in(tmp_path / "runs" / "int4" / "model") == forms_in(tmp_path / "plain")
