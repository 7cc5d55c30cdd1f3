"""A small real run for the tools: demonstrations, the real trainer, no engine; `actorctl` as a user calls it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from typer.testing import CliRunner

from physarum.actors.actorctl.main import app

LIMIT_S = 120.0
ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Runs:
    """A working folder with one configuration, `small.yaml`: ten rows, one epoch, batches of four."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hooks = Path(__file__).with_name("tools_hooks.py")
        values: dict[str, Any] = {
            "run": {"name": "small"},
            "bus": {"max_store_bytes": 256 << 20, "max_deliver": 1},
            "model": {"factory": {"hook": "physarum.agents.calculator.model:build", "args": {"seed": 0}}},
            "source": {
                "name": "demos", "hook": f"{hooks}:Few", "args": {"count": 10}, "group_size": 1, "shuffle": False, "epochs": 1,
            },
            "rollout": {"generate": f"{hooks}:generate"},
            "trainer": {"objective": "sft", "lr": 1e-3, "groups_per_batch": 4, "checkpoint_every": 1, "export_every": 2},
            "groups": {"refills": 0},
            "samples": {"keep": "all"},
            "age": {"bound": 8},
            "stop": {"steps": 100},
        }  # fmt: skip
        (folder / "small.yaml").write_text(yaml.safe_dump(values))

    def actorctl(self, *arguments: str) -> Done:
        """A command inside this process: its output and status are those of the program, its start is saved."""
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(app, list(arguments))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr)

    def up(self, *arguments: str) -> Done:
        """`actorctl up` as a process: it supervises others and configures logging."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "physarum.actors.actorctl", *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    def json(self, *arguments: str) -> Any:
        """What a command that must succeed prints with --json."""
        done = self.actorctl(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def until(self, found: Callable[[], Any]) -> Any:
        """What `found` gives once it gives something: a fact of another process, which only a command tells."""
        limit = time.monotonic() + LIMIT_S
        while not (value := found()):
            assert time.monotonic() < limit, "what the test waits for did not happen"
        return value

    def end(self) -> None:
        """Kills whatever still runs in the folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(str(self.folder) in word for word in process.cmdline()):
                    process.kill()
