"""Which process, of which machine: so that another process of the same machine may know that it has ended.

Nobody can tell of another machine whether a process lives there; for that there are times to live.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from physarum.bus.process_clock import is_alive, started_s

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PIDS: Final = Path("/proc/self/ns/pid")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """`space` names the boot and the pid namespace, within which (pid, start in seconds since boot) is one process."""

    space: str
    pid: int
    started_s: float

    @property
    def known_dead(self) -> bool:
        """True only when this is a process of our own machine (and container) and it has ended."""
        return self.space == _space() and not is_alive(self.pid, self.started_s)


def own() -> ProcessIdentity:
    """Of the calling process."""
    return ProcessIdentity(_space(), os.getpid(), started_s(os.getpid()) or 0.0)


def _space() -> str:
    return f"{_BOOT.read_text().strip()}/{_PIDS.stat().st_ino}"
