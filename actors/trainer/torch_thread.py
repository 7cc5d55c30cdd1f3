"""The one thread in which torch runs: blocking calls are handed to it, and each has a deadline.

A daemon thread, so that a hung collective cannot keep the process alive after the actor gave up on it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from physarum.actors.errors import ActorError

T = TypeVar("T")


class TorchStuckError(ActorError):
    """A torch call did not return within its deadline; only a new process can go on."""


class TorchThread:
    """Runs functions one after another in its own thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._main, name="torch", daemon=True).start()

    async def run(self, call: Callable[[], T], timeout_s: float, what: str) -> T:
        """The call's result. Raises what it raised, or TorchStuckError after `timeout_s`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._calls.put((call, answer, loop))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise TorchStuckError(
                f"{what} did not finish within {timeout_s:g} s (trainer.step_timeout_s); the trainer is started anew from"
                " its last checkpoint"
            ) from error

    def _main(self) -> None:
        while True:
            call, answer, loop = self._calls.get()
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
                _tell(loop, answer, error, None)
            else:
                _tell(loop, answer, None, result)


def _tell(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], error: BaseException | None, result: Any
) -> None:
    def settle() -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
