"""Keeps a hook's process and all that it starts within their limits, and ends them together, however they go.

    actor -- starts, SIGTERM --> keeper -- forks --> the hook's process --> whatever that starts, also in sessions of its own
                                   adopts its orphans, so that all of them stay below it

The keeper does nothing else. It ends them all when the actor asks (SIGTERM), when the actor has ended (the kernel then
sends the same), when the hook's process ends, and when they are above a limit; then it ends as the hook's process did. Of the
memory and number of several processes the kernel tells nobody without a cgroup, so it looks at them every LOOK_S.

Invariant: while the keeper lives nothing escapes it; only SIGKILL to the keeper itself leaves what the hook's process started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from typing import Final, NoReturn

from physarum.actors.reward.family import Member, adopt_orphans, below, held_bytes, kill
from physarum.actors.reward.frames import Limits

LOOK_S: Final = 0.2
_PR_SET_PDEATHSIG: Final = 1
_ROUNDS: Final = 200
_ROUND_S: Final = 0.005


def start_under_keeper(actor: int, limits: Limits) -> None:
    """Call once, before other threads run. Returns in the hook's process; the calling one becomes its keeper."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    adopt_orphans()
    keeper, hook = os.getpid(), os.fork()
    if hook:
        _ends_with(actor, signal.SIGTERM)
        _keep(hook, limits)
    os.setpgid(0, 0)
    _ends_with(keeper, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _ends_with(parent: int, number: signal.Signals) -> None:
    """The kernel sends `number` to this process when `parent` ends; the check closes the window before the request."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _keep(hook: int, limits: Limits) -> NoReturn:
    """Its pipes are closed first: the actor must see the hook's end, not this one's."""
    for descriptor in (0, 1):
        os.close(descriptor)

    def asked(_number: int, _frame: object) -> None:
        _end(hook)

    signal.signal(signal.SIGTERM, asked)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    poller = select.poll()
    poller.register(os.pidfd_open(hook), select.POLLIN)
    while not poller.poll(LOOK_S * 1000):
        family = below(os.getpid())
        above = _above(family, limits)
        if above is not None:
            os.write(2, f"reward hook process {hook}: {above}; it is killed with all that it started\n".encode())
            _end(hook)
        _bury(hook)
    _end(hook)


def _above(family: list[Member], limits: Limits) -> str | None:
    """Which limit is exceeded, and by how much. `family` holds the hook's process."""
    if len(family) > limits.children + 1:
        return f"{len(family) - 1} processes beside it; expected at most reward.children = {limits.children}"
    if limits.total_bytes is not None:
        held = held_bytes([pid for pid, _ in family], limits.total_bytes)
        if held > limits.total_bytes:
            return f"{held >> 20} MiB held; expected at most reward.total_mib = {limits.total_bytes >> 20}"
    return None


def _bury(hook: int) -> None:
    """Orphans that have ended; the hook's process is waited for at the end."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid == hook:
                return
            os.waitpid(found.si_pid, 0)


def _childless() -> bool:
    """Reaps what has ended. That nothing is listed proves nothing: a process that is dying hands its own children over between
    two reads of the list. Without a child, dead or alive, there is nobody left who could."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return False
    return True


def _end(hook: int) -> NoReturn:
    """Kills all, round after round, since one may fork meanwhile; then ends as the hook's process did."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with contextlib.suppress(ProcessLookupError):
        os.kill(hook, signal.SIGKILL)  # nothing where it has ended: its end stays what it was
    _, status = os.waitpid(hook, 0)
    for _ in range(_ROUNDS):
        kill(below(os.getpid()))
        if _childless():
            break
        time.sleep(_ROUND_S)
    ended = os.waitstatus_to_exitcode(status)
    if ended < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -ended != signal.SIGKILL:
            signal.signal(-ended, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-ended})
        os.kill(os.getpid(), -ended)
    os._exit(ended if ended >= 0 else 1)
