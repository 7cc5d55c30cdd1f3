"""Ordinary chat data through a whole run: generated problems and a Parquet file by weight, one of whose prompts is too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from physarum.actors.tools.exported import Row, read_rows
from physarum.agents.calculator.model import build

pytest.importorskip("reasoning_gym")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "stub_engine"
TOO_LONG = "x" * 200


def configuration(folder: Path) -> dict[str, Any]:
    build(folder / "model", seed=0)
    prompts = [[{"role": "user", "content": TOO_LONG if number == 2 else f"{number}+1"}] for number in range(4)]
    parquet.write_table(pa.table({"messages": prompts, "answer": list("1234")}), folder / "sums.parquet")
    judging = folder / "judging.py"
    judging.write_text("def judge(execution):\n    return len(execution.samples[-1].outputs['text']) / 100\n")
    parts = [
        {"name": "made", "weight": 3, "environment": {"name": "chain_sum", "args": {"max_terms": 2, "size": 50}}},
        {
            "name": "filed",
            "data": "sums.parquet",
            "columns": {"prompt": "messages", "label": "answer"},
            "shuffle": False,
        },
    ]
    return {
        "run": {"name": "chat"},
        "bus": {"max_store_bytes": 256 << 20},
        "model": {"path": str(folder / "model")},
        "source": {"name": "tasks", "mixture": parts, "group_size": 2, "chat": {"system_prompt": "add"}},
        "rollout": {
            "generate": "physarum.agents.single_turn:generate", "args": {"max_prompt_tokens": 150},
            "sampling": {"max_new_tokens": 24},
        },
        "reward": {"hook": f"{judging}:judge"},
        "engines": {"policy": {"python": sys.executable, "env": {"PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}"}}},
        "samples": {"keep": "all"},
        "trainer": {"objective": "rl", "lr": 1e-3, "groups_per_batch": 8, "tokens_per_microbatch": 2048},
        "stop": {"steps": 4},
    }  # fmt: skip


def actorctl(folder: Path, *words: str, status: int = 0) -> str:
    """What it printed: its result, or its error where it must end so."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "physarum.actors.actorctl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stderr if status else done.stdout


def test_chat_data_is_trained_by_weight_and_what_cannot_be_run_is_accounted(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(tmp_path)))
    summary = json.loads(actorctl(tmp_path, "up", "run.yaml", "--json"))
    account = summary["account"]
    assert (summary["steps"], account["imbalance"], account["double_trained"]) == (4, 0, 0)
    letters = json.loads(actorctl(tmp_path, "dead", "ls", "chat", "--json"))["letters"]
    assert letters and all("PromptTooLongError" in letter["reason"] for letter in letters)
    assert {(letter["deliveries"], letter["task"].partition("+")[2]) for letter in letters} == {(1, "")}, (
        "no second try"
    )
    actorctl(tmp_path, "export", "chat", "samples.jsonl")
    tasks = [row.execution.task for row in read_rows(tmp_path / "samples.jsonl") if isinstance(row, Row)]
    counts = Counter({task.group: task.metadata["mixture"] for task in tasks}.values())
    assert counts["made"] > counts["filed"] > 0
    assert {task.metadata["chat"]["system_prompt"] for task in tasks} == {"add"}
    (tmp_path / "more.jsonl").write_text('{"prompt": "1+1"}\n')
    assert "is finished: nobody issues what is added" in actorctl(
        tmp_path, "tasks", "add", "chat", "more.jsonl", status=2
    )
    assert json.loads(actorctl(tmp_path, "tasks", "ls", "chat", "--json")) == {"rows": []}
