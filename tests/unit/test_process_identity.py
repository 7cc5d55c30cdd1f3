"""Whether another process has ended: known on this machine, never assumed of another."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from physarum.bus.process_clock import started_s
from physarum.bus.process_identity import ProcessIdentity, own


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    started = started_s(process.pid)
    assert started is not None
    return ProcessIdentity(own().space, process.pid, started)


def test_we_live() -> None:
    assert not own().known_dead


def test_a_killed_process_is_known_dead_also_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identity_of(process)
        assert not found.known_dead
        process.kill()
        process.wait()
    assert found.known_dead


def test_a_reused_pid_is_another_process() -> None:
    mine = own()
    assert msgspec.structs.replace(mine, started_s=mine.started_s - 1).known_dead


def test_of_another_machine_nothing_is_known() -> None:
    assert not ProcessIdentity("another-boot/1", 999_999_999, 0.0).known_dead
