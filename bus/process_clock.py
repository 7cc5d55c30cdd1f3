"""When a process started, by a clock that nobody can set: with the pid it names one process for good.

The kernel counts a process's start in ticks since boot. psutil's `create_time` adds the wall clock's idea of when the
boot was, which moves whenever the clock is set: after a jump a live process would look like another one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_STATE, _START_TICKS = 0, 19
"""Fields of /proc/PID/stat behind the name, which may hold blanks and brackets (proc(5) counts them from 3)."""
_ENDED: Final = ("Z", "X")


def started_s(pid: int) -> float | None:
    """Seconds from boot to the start of process `pid`; None when there is no such process, or it has ended (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in _ENDED else int(fields[_START_TICKS]) / _TICKS_PER_S


def is_alive(pid: int, began_s: float) -> bool:
    """Whether the process `pid` that started `began_s` seconds after boot still runs (a zombie does not)."""
    return started_s(pid) == began_s
