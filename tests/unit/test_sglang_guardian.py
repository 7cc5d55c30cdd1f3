"""No process of a guarded command outlives its owner, however either ends; ports that are held are given to nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from physarum.actors.engine import guardian
from physarum.actors.engine.port import ReservedPort

pytestmark = pytest.mark.timeout(30)

# A command whose child is in a session of its own, so that killing the process group does not reach it.
FAMILY = "(setsid sleep 600 & echo $! ; wait) & trap '' TERM; echo ready; wait"


def guarded(owner: int, grace_s: float, command: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(guardian.__file__), str(owner), str(grace_s), *command]


def test_exit_status_is_the_commands() -> None:
    run = subprocess.run(guarded(os.getpid(), 0, ["sh", "-c", "exit 7"]), check=False)
    assert run.returncode == 7
    killed = subprocess.run(guarded(os.getpid(), 0, ["sh", "-c", "kill -9 $$"]), check=False)
    assert killed.returncode == 128 + signal.SIGKILL


def test_stopping_ends_also_what_ignores_sigterm_or_left_the_group() -> None:
    process = subprocess.Popen(
        guarded(os.getpid(), 0.1, ["sh", "-c", FAMILY]), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    (stray,) = [psutil.Process(int(line)) for line in lines if line != "ready"]
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not stray.is_running()


def test_death_of_the_owner_ends_the_command() -> None:
    script = (
        "import subprocess, sys, time, os\n"
        f"subprocess.Popen([*sys.argv[1:5], str(os.getpid()), '600', 'sh', '-c', {FAMILY!r}], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    prefix = [sys.executable, "-I", "-S", str(guardian.__file__)]
    owner = subprocess.Popen([sys.executable, "-c", script, *prefix], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline(), owner.stdout.readline()
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(family) >= 3
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_death_of_the_guardian_ends_the_commands_first_process() -> None:
    process = subprocess.Popen(
        guarded(os.getpid(), 600, ["sh", "-c", "echo $$; read line"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([first], timeout=5)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_an_owner_that_is_not_the_parent_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    run = subprocess.run(guarded(1, 0, ["touch", str(mark)]), check=False)
    assert run.returncode == 1 and not mark.exists()


def test_fifty_reserved_ports_differ_and_can_be_listened_on() -> None:
    held = [ReservedPort() for _ in range(50)]
    assert len({port.number for port in held}) == 50
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", held[0].number))
        server.listen()
    for port in held:
        port.close()
