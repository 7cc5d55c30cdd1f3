"""SIGKILL of a tool that makes a run, and of the recorder: nothing half is taken for a run, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bad_input
import pytest
from tools_run import ROOT, Runs

from physarum.actors.supervisor.process import read_records

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("killed"))
    try:
        done = made.up("up", "small.yaml", "--json")
        assert done.returncode == 0, done.stderr[-4000:]
        yield made
        assert bad_input.processes_of(made.folder) == []
    finally:
        made.end()


def started(runs: Runs, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "physarum.actors.actorctl", *arguments]
    with (runs.folder / "tool.log").open("wb") as log:
        return subprocess.Popen(command, cwd=runs.folder, env=environment, stdout=log, stderr=log)


def kill_when(there: Path, tool: subprocess.Popen[bytes]) -> None:
    bad_input.until(lambda: there.exists() or tool.poll() is not None, f"{there}")
    tool.kill()
    assert tool.wait() == -signal.SIGKILL, "it was done before it could be killed"


COMMANDS = {
    "import": ("import", "out.jsonl"),
    "fork": ("fork", "small", "--at-step", "1"),
    "replay": ("replay", "small", "--no-start"),
}


@pytest.mark.parametrize("where", ["bus/server.json", "unfinished", "bus/endpoint.json"])
@pytest.mark.parametrize("tool", COMMANDS)
def test_a_run_whose_maker_was_killed_is_no_run_and_is_made_anew(runs: Runs, tool: str, where: str) -> None:
    runs.json("export", "small", "out.jsonl")
    name = f"{tool}-{Path(where).stem}"
    kill_when(runs.folder / "runs" / name / where, started(runs, *COMMANDS[tool], "--run", name))
    if (runs.folder / "runs" / name / "config.yaml").exists():
        refused = runs.actorctl("ledger", name)
        assert refused.returncode == 2
        assert f"the `actorctl {tool}` that was making it was ended. Run that command again" in refused.stderr
    runs.json(*COMMANDS[tool], "--run", name)
    account = runs.json("ledger", name)
    assert (account["issued"], account["imbalance"], account["double_trained"]) == (10, 0, 0)


def test_a_recorder_that_is_killed_again_and_again_loses_nothing(runs: Runs) -> None:
    settings = (
        "run.name=rec",
        "source.args={count: 50000}",
        "stop.steps=1000000",
        "stop.samples=8000",
        "supervisor.backoff_s=0.1",
    )
    recording = started(runs, "rollout-only", "small.yaml", *settings)
    said = runs.folder / "tool.log"
    for death in range(1, 4):
        bad_input.until(lambda: said.read_text().count("recorder-0 is ready") >= death, f"recorder number {death}")  # noqa: B023
        (record,) = (one for one in read_records(runs.folder / "runs/rec/actors") if one.role == "recorder")
        os.kill(record.pid, signal.SIGKILL)
    assert recording.wait(bad_input.LIMIT_S) == 0, said.read_text()
    summary = json.loads((runs.folder / "runs" / "rec" / "summary.json").read_text())
    account = summary["account"]
    assert account["issued"] == account["in_flight"] >= 8000
    assert (account["imbalance"], account["double_trained"], account["dead"]) == (0, 0, 0)
