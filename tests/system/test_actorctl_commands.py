"""The command line, as a user calls it: a process, its output and its exit status. The actors are stubs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from supervisor_run import QUIET, processes_of, write_config

pytestmark = pytest.mark.timeout(120)

PROGRAM = [sys.executable, str(Path(__file__).with_name("supervisor_actorctl.py"))]
LIMIT_S = 60.0


def actorctl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "120"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working folder; whatever runs in it is ended after the test."""
    yield tmp_path
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(tmp_path) in word for word in process.cmdline()) and process.pid != os.getpid():
                process.kill()


def look(folder: Path) -> tuple[int | None, dict[str, int]]:
    """(pid of the supervisor, pid of each actor)."""
    state = json.loads(actorctl(folder, "ps", "stub", "--json").stdout)
    return state["supervisor"], {actor["instance"]: actor["pid"] for actor in state["actors"]}


def test_a_run_prints_its_summary_as_json_and_is_not_run_twice(folder: Path) -> None:
    write_config(folder, {"trainer-0": "train 2"})
    first = actorctl(folder, "up", "stub.yaml", "--json")
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert (summary["steps"], summary["account"]["imbalance"]) == (2, 0)
    assert "stub: step 2/3  reward 0.500  loss 0.2500" in first.stderr

    again = actorctl(folder, "up", "stub.yaml", "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, summary)
    assert "Nothing was started" in again.stderr

    other = actorctl(folder, "up", "stub.yaml", "trainer.lr=2e-3")
    assert (other.returncode, other.stdout) == (2, "")
    assert "different: `trainer.lr`" in other.stderr
    assert "run.name=NAME" in other.stderr

    for arguments in (("ledger", "stub", "--json"), ("ledger", "stub.yaml", "--json", "--recount")):
        counted = actorctl(folder, *arguments)
        assert (counted.returncode, json.loads(counted.stdout)) == (0, summary["account"])
    assert processes_of(folder) == []


def test_settings_on_the_command_line_reach_the_run(folder: Path) -> None:
    write_config(folder, {"trainer-0": "train 1"})
    settings = ("--megatron-hidden-dropout", "0.5", "--json", "run.name=other", "trainer.lr=5e-4")
    made = actorctl(folder, "up", "stub.yaml", *settings)
    assert made.returncode == 0, made.stderr
    recorded = (folder / "runs" / "other" / "config.yaml").read_text()
    assert "hidden_dropout: 0.5" in recorded
    assert "lr: 0.0005" in recorded


@pytest.mark.slow
def test_killed_supervisor_leaves_actors_working_and_the_next_adopts_them(folder: Path) -> None:
    write_config(folder, {})
    started = actorctl(folder, "up", "--detach", "stub.yaml")
    assert started.returncode == 0, started.stderr
    supervisor, before = look(folder)
    assert supervisor is not None
    assert set(before) == {"checkpoint-0", "source-0", "trainer-0", "janitor-0"}
    refused = actorctl(folder, "up", "stub.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "already has a supervisor: process" in refused.stderr

    os.kill(supervisor, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(supervisor)] if psutil.pid_exists(supervisor) else [], timeout=LIMIT_S)
    assert look(folder) == (None, before)
    assert "no supervisor" in actorctl(folder, "ps", "stub").stdout

    assert actorctl(folder, "up", "stub.yaml", "--detach").returncode == 0
    assert look(folder)[1] == before
    assert json.loads(actorctl(folder, "ledger", "stub", "--json").stdout)["imbalance"] == 0
    down = actorctl(folder, "down", "--json")
    assert (down.returncode, json.loads(down.stdout)["run"]) == (0, "stub")
    assert processes_of(folder) == []
    assert actorctl(folder, "ps", "stub").returncode == 3
    assert actorctl(folder, "down").stdout == "nothing is running\n"


def test_down_ends_actors_and_bus_that_have_no_supervisor(folder: Path) -> None:
    write_config(folder, {})
    assert actorctl(folder, "up", "-d", "stub.yaml").returncode == 0
    supervisor, _ = look(folder)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    stopped = json.loads(actorctl(folder, "down", "stub.yaml", "--json").stdout)
    assert set(stopped["actors"]) == {"checkpoint-0", "source-0", "trainer-0", "janitor-0"}
    assert stopped["bus"] is True
    assert processes_of(folder) == []


def test_a_failed_start_in_the_background_is_shown_with_its_status(folder: Path) -> None:
    """Detached or not, the reason comes to the one who typed the command."""
    write_config(folder, {}, bus={"url": "nats://127.0.0.1:9", "start_timeout_s": 1.0})
    made = actorctl(folder, "up", "--detach", "stub.yaml")
    assert made.returncode == 4
    assert "no NATS server accepted a connection at nats://127.0.0.1:9" in made.stderr
    assert "Traceback" not in made.stderr


def test_interrupt_drains_and_exits_130(folder: Path) -> None:
    write_config(folder, {})
    with subprocess.Popen(
        [*PROGRAM, "up", "stub.yaml"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None and up.stderr is not None
        while "trainer-0 is ready" not in (line := up.stdout.readline()):
            assert line, up.stderr.read()
        up.send_signal(signal.SIGINT)
        _, errors = up.communicate(timeout=LIMIT_S)
    assert up.returncode == 130
    assert "start the same configuration to continue it" in errors
    assert processes_of(folder) == []


def test_a_run_that_fails_names_the_actor_and_shows_its_last_lines(folder: Path) -> None:
    write_config(folder, {"trainer-0": "exit 78"})
    failed = actorctl(folder, "up", "stub.yaml")
    assert failed.returncode == 1
    for words in (
        "error: the actor trainer/trainer-0",
        "the stub ends on purpose",
        "runs/stub/logs/trainer-0.log",
        "Remedy",
    ):
        assert words in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "Traceback" in actorctl(folder, "up", "-v", "stub.yaml").stderr


def test_logs_show_who_said_what(folder: Path) -> None:
    write_config(folder, {"trainer-0": "train 1"})
    assert actorctl(folder, "up", "stub.yaml", "--json").returncode == 0
    lines = [json.loads(line) for line in actorctl(folder, "logs", "stub", "-n", "1", "--json").stdout.splitlines()]
    assert {"trainer-0", "supervisor"} <= {line["instance"] for line in lines}  # the others may end before they log
    trainer = actorctl(folder, "logs", "stub", "trainer-0").stdout
    assert "-> draining" in trainer
    assert "supervisor" not in trainer
    missing = actorctl(folder, "logs", "stub", "engine-7")
    assert missing.returncode == 3
    assert "there are: checkpoint-0, janitor-0, source-0, supervisor, trainer-0" in missing.stderr


def test_check_names_every_problem_and_starts_nothing(folder: Path) -> None:
    path = write_config(folder, {})
    assert actorctl(folder, "check", "stub.yaml").stdout == "stub.yaml: no problem found\n"
    (folder / "model" / "model.safetensors").unlink()
    checked = actorctl(folder, "check", path.name, "--json", "source.hook=nosuch.module:Rows")
    found: list[dict[str, Any]] = json.loads(checked.stdout)["problems"]
    assert checked.returncode == 2
    assert {problem["severity"] for problem in found} == {"error"}
    assert any("nosuch" in problem["found"] for problem in found)
    assert any("model.safetensors" in problem["found"] for problem in found)
    refused = actorctl(folder, "up", path.name)
    assert refused.returncode == 2
    assert "model.safetensors" in refused.stderr
    assert not (folder / "runs").exists()


def test_bad_input_is_one_message_and_no_traceback(folder: Path) -> None:
    write_config(folder, {})
    unknown = actorctl(folder, "up", "stub.yaml", "trainer.lrr=1")
    assert unknown.returncode == 2
    assert "trainer.lrr: found unknown key" in unknown.stderr
    assert "did you mean `trainer.lr`" in unknown.stderr
    nothing = actorctl(folder, "ps", "nosuch")
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no run 'nosuch'" in nothing.stderr
    assert "Traceback" not in unknown.stderr + nothing.stderr
    assert actorctl(folder, "up").returncode == 2


def test_a_terminal_shows_the_live_table(folder: Path) -> None:
    write_config(folder, {"trainer-0": "train 3"}, supervisor={**QUIET, "heartbeat_s": 0.2})
    main, side = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, "up", "stub.yaml"], cwd=folder, env=environment(), stdin=side, stdout=side, stderr=side
    ) as up:
        os.close(side)
        shown = _read_all(main)
        assert up.wait(LIMIT_S) == 0, shown
    for words in ("physarum", "queues", "TASKS", "trainer-0", "account", "13 issued = 12 trained"):
        assert words in shown, shown


def test_help_documents_the_exit_status(folder: Path) -> None:
    for arguments in ((), ("up",), ("ledger",)):
        assert "4 the bus" in " ".join(actorctl(folder, *arguments, "--help").stdout.split())
    assert json.loads(actorctl(folder, "version", "--json").stdout)["physarum"]


def _read_all(terminal: int) -> str:
    """Everything until the other side closes (Linux then reports an error)."""
    found, waiting = b"", select.poll()  # select() knows no descriptor above 1023
    waiting.register(terminal, select.POLLIN)
    with contextlib.suppress(OSError):
        while waiting.poll(LIMIT_S * 1000) and (data := os.read(terminal, 65536)):
            found += data
    os.close(terminal)
    return found.decode(errors="replace")
