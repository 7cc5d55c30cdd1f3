"""`actorctl` as a user calls it, on a small real run (SFT on demonstrations: no engine), and what a refusal must be like."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

PROGRAM = [sys.executable, "-m", "physarum.actors.actorctl"]
LIMIT_S = 60.0
NAME = "bad"

QUESTION = {"text": "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", "train": False}
ANSWER = {"text": "2<|im_end|>", "train": True}


def configuration() -> dict[str, Any]:
    """Everything right: each test makes one thing wrong."""
    return {
        "run": {"name": NAME},
        "model": {"factory": {"hook": "physarum.agents.calculator.model:build", "args": {"seed": 0}}},
        "source": {
            "name": "demos",
            "hook": "physarum.agents.calculator.demonstrations:Demonstrations",
            "args": {"tool_share": 1.0, "rows": 2},
            "group_size": 1,
            "shuffle": False,
        },
        "rollout": {"generate": "physarum.agents.demonstration:generate", "slots": 4},
        "trainer": {"objective": "sft", "lr": 1e-3, "groups_per_batch": 1, "checkpoint_every": 5},
        "bus": {"ack_wait_s": 5.0, "fetch_timeout_s": 1.0},
        "age": {"bound": 2},
        "stop": {"steps": 6},
        "supervisor": {"heartbeat_s": 0.5, "heartbeat_limit_s": 10.0, "backoff_s": 0.1, "drain_timeout_s": 10.0},
    }


def write(folder: Path, values: dict[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def actorctl(folder: Path, *arguments: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=limit_s
    )


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`actorctl up` under way; its output goes to `up.log`."""
    with (folder / "up.log").open("w") as log:
        up = subprocess.Popen(
            [*PROGRAM, "up", *arguments], cwd=folder, env=environment(), stdout=log, stderr=log, text=True
        )
        try:
            yield up
        finally:
            up.kill()
            up.wait()


def refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """One message with all these words, no traceback, the documented status."""
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    messages = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, output
    missing = [word for word in words if word not in output]
    assert not missing, (missing, output)
    assert "Traceback" not in output


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Waits for a fact of other processes that announces itself to nobody."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s:g} s"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that work in or on `folder`."""
    return [" ".join(process.cmdline()) for process in _living(folder)]


def end_processes_of(folder: Path) -> None:
    for process in _living(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()


def account(folder: Path, *options: str) -> dict[str, Any]:
    done = actorctl(folder, "ledger", NAME, "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def log_of(folder: Path, instance: str) -> str:
    return (folder / "runs" / NAME / "logs" / f"{instance}.log").read_text(errors="replace")


def _living(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = any(str(folder) in word for word in process.cmdline()) or Path(process.cwd()).is_relative_to(folder)
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
