"""What a process started, and how much memory they hold together, as /proc says.

A process that adopts its orphans (`adopt_orphans`) stays the ancestor of all that it started, whatever session or group they
moved to. Invariant: a process is named by pid and start, so that none that got its number later is taken for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

from physarum.bus.process_clock import started_s

_PR_SET_CHILD_SUBREAPER: Final = 36
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_RESIDENT: Final = 1
"""Field of /proc/PID/statm."""

Member = tuple[int, float]
"""pid, and start in seconds since boot."""


def adopt_orphans() -> None:
    """Orphans below this process become its children, not the machine's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def below(pid: int) -> list[Member]:
    """Everything that `pid` started and that still runs. Empty on a kernel that lists no children."""
    found: list[Member] = []
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            waiting.append(child)
            started = started_s(child)  # None: it has ended, and only its number is left
            if started is not None:
                found.append((child, started))
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found += map(int, (thread / "children").read_text().split())
    return found


def lists_children(proc: Path = Path("/proc")) -> bool:
    """Whether the kernel says what a process started (CONFIG_PROC_CHILDREN)."""
    return (proc / f"{os.getpid()}/task/{os.getpid()}/children").exists()


def held_bytes(pids: list[int], limit: int) -> int:
    """Memory of them all. Pages that forks share count once where it matters: if counted for each they were above `limit`."""
    resident = sum(_resident(pid) for pid in pids)
    return resident if resident <= limit else sum(_proportional(pid) for pid in pids)


def kill(members: list[Member]) -> None:
    """SIGKILL to those that are still who they were."""
    for pid, started in members:
        if started_s(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[_RESIDENT]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Each page divided by how many have it."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return _resident(pid)
