"""Ends what a hook started once the hook's process is gone, however it went.

A killed process takes its children with it only if somebody kills them: the actor does so for a call that is overdue,
and when the actor itself was killed nobody would. So a process that does nothing else waits for the hook's process
(pidfd, no polling) and then kills its process group. What a hook moves into a session of its own is its own affair.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal


def start_reaper() -> None:
    """Call once, as the leader of a process group and before other threads run: forks twice, so that the hook's process
    has no child that it did not make."""
    watched = os.getpid()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            _reap(watched)
    finally:
        os._exit(0)


def _reap(watched: int) -> None:
    """Runs in the grandchild. Its pipes are closed first: the actor must see the hook's end, not this one's."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        poller = select.poll()
        poller.register(os.pidfd_open(watched), select.POLLIN)
        poller.poll()
        os.killpg(watched, signal.SIGKILL)
