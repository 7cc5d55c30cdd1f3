"""A blocked event loop is named, with the place where it stands, within three seconds; a busy one is not."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from physarum.actors.watchdog import Watchdog


async def test_a_blocked_loop_is_named_with_its_place_within_three_seconds() -> None:
    watchdog = Watchdog()
    watchdog.start()
    reported, said = threading.Event(), list[str]()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has been blocked" in record.getMessage():
                said.append(record.getMessage())  # before it is seen elsewhere: other handlers come after this one
                reported.set()

    notice = Notice()
    logging.getLogger("physarum.actors.watchdog").addHandler(notice)
    try:
        began = time.monotonic()
        assert reported.wait(3.0), "the loop was blocked for three seconds and nobody said so"  # blocks the loop
        assert time.monotonic() - began <= 3.0
        await asyncio.sleep(0)
    finally:
        watchdog.stop()
        logging.getLogger("physarum.actors.watchdog").removeHandler(notice)
    assert watchdog.blocked == 1
    assert "test_a_blocked_loop_is_named" in said[0]


async def test_a_loop_that_is_merely_busy_is_left_alone() -> None:
    watchdog = Watchdog(limit_s=1.0)
    watchdog.start()
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        await asyncio.sleep(0)
    watchdog.stop()
    assert watchdog.blocked == 0
