"""Work that somebody else may end, by name: its task is then done with, and not to be tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class CutOffError(Exception):
    """Base: nothing that the episode still makes would be trained."""


class Cuttable:
    """One piece of work. A cancellation from outside (the worker drains) stays one."""

    def __init__(self) -> None:
        self._work: asyncio.Future[Any] | None = None
        self._why: CutOffError | None = None

    @property
    def is_cut(self) -> bool:
        return self._why is not None

    async def run(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises what `cut` was given."""
        self._work = asyncio.ensure_future(work)
        try:
            result: T = await self._work
            return result
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._why is not None and current is not None and not current.cancelling():
                raise self._why from None
            raise

    def cut(self, why: CutOffError) -> None:
        """Ends the work, if it runs."""
        if self._work is not None and not self._work.done():
            self._why = why
            self._work.cancel()
