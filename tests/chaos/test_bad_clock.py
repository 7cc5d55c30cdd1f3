"""A wall clock that jumps: nobody takes a live process for another one, and no time limit of the run is met by it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from physarum.actors.supervisor.process import ActorProcess, ActorRecord, read_records
from physarum.actors.supervisor.run_lock import RunLock, holder
from physarum.bus import process_clock
from physarum.bus.server import EmbeddedServer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60)]

DAY_S = 86_400.0


class Clock:
    """The wall clock as this process sees it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def jump(self) -> None:
        """It is a day ahead from now on, and with it the time of boot from which psutil counts a process's start."""
        now, boot, began = time.time, psutil.boot_time() + DAY_S, psutil.Process().create_time()
        self._patch.setattr(time, "time", lambda: now() + DAY_S)
        self._patch.setattr("psutil._pslinux.boot_time", lambda: boot)
        self._patch.setattr("psutil._pslinux.BOOT_TIME", boot, raising=False)
        assert psutil.Process().create_time() > began + DAY_S - 60  # so an identity made of it would be another one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def record(log: Path) -> ActorRecord:
    return ActorRecord(
        role="source", instance="source-0", pid=0, started_at=0.0, restarts=0, gpus=(), log=str(log), log_start=0
    )


async def test_a_running_actor_is_adopted_after_the_clock_was_set(tmp_path: Path, clock: Clock) -> None:
    """An identity by wall-clock start would miss it, and a second one would be started beside it."""
    process = await _sleeper(tmp_path)
    clock.jump()
    (found,) = read_records(tmp_path)
    adopted = ActorProcess.adopt(found)
    assert adopted is not None
    adopted.kill()
    await process.wait()
    assert not found.alive


async def test_the_running_bus_is_found_after_the_clock_was_set(tmp_path: Path, clock: Clock) -> None:
    server = EmbeddedServer(tmp_path / "bus")
    started = await server.ensure()
    try:
        clock.jump()
        assert EmbeddedServer(tmp_path / "bus").running() == started
    finally:
        await server.stop()


def test_the_supervisor_is_found_after_the_clock_was_set(tmp_path: Path, clock: Clock) -> None:
    with RunLock(tmp_path):
        clock.jump()
        found = holder(tmp_path)
        assert found is not None and found.pid == os.getpid()


def test_a_process_that_ended_or_whose_number_was_given_away_is_not_alive() -> None:
    mine = process_clock.started_s(os.getpid())
    assert mine is not None and process_clock.is_alive(os.getpid(), mine)
    assert not process_clock.is_alive(os.getpid(), mine - 0.01)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, not yet reaped
        assert process_clock.started_s(child.pid) is None
    assert process_clock.started_s(child.pid) is None


async def _sleeper(folder: Path) -> ActorProcess:
    return ActorProcess.start(["sleep", "600"], os.environ, record(folder / "log"), folder)
