"""Waiting that ends when the actor is asked to drain. Every wait here is on events; none polls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from physarum.actors.context import Context

T = TypeVar("T")


async def unless_draining(context: Context, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
    """The result of `work`, or None when draining came first; `work` then has `grace_s` more seconds, and is cancelled."""
    task = asyncio.ensure_future(work)
    drain = asyncio.ensure_future(context.draining.wait())
    try:
        await asyncio.wait({task, drain}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s > 0:
            await asyncio.wait({task}, timeout=grace_s)
        return task.result() if task.done() else None
    finally:
        drain.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
