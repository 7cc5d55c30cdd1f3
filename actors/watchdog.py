"""Names an event loop that is blocked, while it is blocked: a thread asks the loop for a sign of life.

A blocked loop cannot report itself: its heartbeats stop, and after `supervisor.heartbeat_limit_s` the supervisor says so.
Long before that this thread writes into the actor's log where the loop stands.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import Final

_log = logging.getLogger(__name__)

LIMIT_S: Final = 2.0
_ASK_EVERY_S: Final = 0.5


class Watchdog:
    """Watches the running loop from its own thread until `stop`. Call `start` on the loop."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self.blocked = 0
        """How often the loop was found blocked."""

    def start(self) -> None:
        loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, loop_thread), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        while not self._stopped.wait(_ASK_EVERY_S):
            self._answered.clear()
            asked_at = time.monotonic()
            try:
                loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # the loop is closed
            if not self._answered.wait(self._limit_s):
                self._report(loop_thread, asked_at)

    def _report(self, loop_thread: int, asked_at: float) -> None:
        self.blocked += 1
        frame = sys._current_frames().get(loop_thread)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "(its thread is gone)"
        _log.error(
            "the event loop has been blocked for %.1f s: nothing on the bus is answered meanwhile. It stands at:\n%s"
            "Move what blocks into a thread or process",
            time.monotonic() - asked_at,
            where,
        )
        while not self._answered.wait(_ASK_EVERY_S):
            if self._stopped.is_set():
                return
        _log.warning("the event loop goes on after %.1f s", time.monotonic() - asked_at)
