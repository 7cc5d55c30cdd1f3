"""The user's wish that the run stop: once drains, twice stops at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from physarum.actors.supervisor.errors import InterruptedRunError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class StopRequest:
    """`asked` is set by the first request, `at_once` by the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            _log.warning("stopping at once: asked a second time")
            self.at_once.set()
        else:
            _log.warning("draining; ask again to stop at once")
            self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and (unless it is ignored, as under nohup) SIGHUP ask. Runs inside the event loop."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or InterruptedRunError as soon as the user asks to stop (the work is cancelled)."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise InterruptedRunError("stopped before the run was set up; start it again to go on")
        finally:
            for one in (task, asked):
                one.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
