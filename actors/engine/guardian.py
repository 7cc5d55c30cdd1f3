"""Runs one command and makes sure that no process of it outlives its owner. Stands alone: standard library only.

    python guardian.py OWNER_PID GRACE_S COMMAND...

Invariant: when the owner is gone, by whatever signal, every process of the command is killed at once. SGLang's workers
ask the kernel to die with their parent, but only after seconds of imports; a server killed while it starts would leave
them behind, holding a GPU. So a process that does nothing else waits on the owner and on the command (pidfds, no
polling) and kills the command's process group. Orphans of the command become the guardian's children (subreaper), so it
also ends those that left the group, and when it exits nothing of the command is left. Should the guardian itself be
killed, the kernel kills the command's first process (PR_SET_PDEATHSIG), and that one's workers follow.

SIGTERM or SIGINT: the command gets SIGTERM, and what is left after GRACE_S seconds SIGKILL. Exit status: the command's
(128 + signal when it was killed).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_guardian(guardian: int) -> None:
    """In the child, before it becomes the command. The check closes the window in which the guardian died first."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _watch(child: subprocess.Popen[bytes], owner_fd: int, signal_fd: int, grace_s: float) -> None:
    """Returns when the command's first process has ended."""
    child_fd = os.pidfd_open(child.pid)
    poller = select.poll()
    for descriptor in (owner_fd, child_fd, signal_fd):
        poller.register(descriptor, select.POLLIN)
    deadline: float | None = None
    while True:
        wait_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        ready = {descriptor for descriptor, _ in poller.poll(wait_ms)}
        if child_fd in ready:
            return
        if owner_fd in ready or not ready:
            _kill_group(child.pid, signal.SIGKILL)
            poller.unregister(owner_fd)
            deadline = None
        if signal_fd in ready:
            os.read(signal_fd, 64)
            if deadline is None:
                deadline = time.monotonic() + grace_s
                child.terminate()


def _children() -> list[int]:
    """Processes whose parent this is, orphans of the command included."""
    own = str(os.getpid())
    found: list[int] = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[1] == own:
                found.append(int(entry))
    return found


def _end_all(child: subprocess.Popen[bytes]) -> int:
    """Kills and reaps everything that is left; the exit status of the command's first process."""
    _kill_group(child.pid, signal.SIGKILL)
    code = child.wait()
    while True:
        for process in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return code


def main(arguments: list[str]) -> int:
    owner, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        return 1
    if os.getppid() != owner:
        return 1
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guardian = os.getpid()
    child = subprocess.Popen(command, process_group=0, preexec_fn=lambda: _die_with_guardian(guardian))
    try:
        _watch(child, owner_fd, read_fd, grace_s)
    finally:
        code = _end_all(child)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
