"""Leasing as an actor may: nothing while it is paused, nothing more once it drains."""

from __future__ import annotations

from typing import Final

from physarum.actors.context import Context
from physarum.actors.waiting import unless_draining
from physarum.bus.work import Delivery, WorkQueue

_DRAIN_GRACE_S: Final = 0.2
"""A fetch that is receiving leases when draining begins ends within this; one that waits is cancelled."""


async def lease(context: Context, queue: WorkQueue, batch: int) -> list[Delivery]:
    """Up to `batch` deliveries, as soon as there is one; none when the wait is over, or draining begins. What comes by a
    request that was under way when the actor was paused goes back: others have it at once."""
    await context.resumed.wait()
    fetch = queue.fetch(batch, context.config.bus.fetch_timeout_s)
    taken = await unless_draining(context, fetch, _DRAIN_GRACE_S) or []
    if not context.paused:
        return taken
    for delivery in taken:
        await delivery.give_back()
    return []
