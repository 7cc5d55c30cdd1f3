"""One receiver of a host fetches a version; the others wait, and find it there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from physarum.weightsync.area import SharedArea


@asynccontextmanager
async def alone(area: SharedArea, label: str) -> AsyncIterator[None]:
    """One receiver of a host fetches a version. Who holds it has a deadline for each chunk, and loses it with its process."""
    waiting = asyncio.ensure_future(asyncio.to_thread(area.alone, label))
    try:
        descriptor = await asyncio.shield(waiting)
    except asyncio.CancelledError:
        waiting.add_done_callback(_give_back)  # a thread cannot be cancelled: it gets the lock, and nobody needs it
        raise
    try:
        yield
    finally:
        os.close(descriptor)


def _give_back(waiting: asyncio.Future[int]) -> None:
    if not waiting.cancelled() and waiting.exception() is None:
        os.close(waiting.result())
