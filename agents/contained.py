"""A user's code in a task of ours: its own CancelledError is an error like any other, and nobody's cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class OwnCancellationError(RuntimeError):
    """CancelledError came out of user's code in a task that nobody cancelled."""


async def contained(work: Awaitable[T]) -> T:
    """The result of `work`. Raises OwnCancellationError for a cancellation that is not this task's: usually a task of the
    user's was cancelled and then awaited. Taken for ours it would be answered as a drain is, or end whoever waits here."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise OwnCancellationError(
            "CancelledError, and nobody had cancelled it: a task was awaited that had been cancelled; expected"
            " `with contextlib.suppress(asyncio.CancelledError)` around such an await"
        ) from error
