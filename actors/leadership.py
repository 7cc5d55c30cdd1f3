"""Acting for a role that only one may have: wait for its lease, act, stop at once when it is lost, give it up at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from physarum.actors.context import Context
from physarum.actors.waiting import unless_draining
from physarum.bus.errors import LeaseLostError
from physarum.bus.lease import Lease, acquire


@asynccontextmanager
async def leading(context: Context, name: str) -> AsyncIterator[Lease | None]:
    """The lease `name`, as soon as it is free; None when draining began first.

    A lease that is lost cancels the block, which then ends with LeaseLostError (in an exception group).
    """
    loop, lost = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(lost.set)

    owner = context.identity.instance
    taking = acquire(context.endpoint, context.bus, context.publisher, name, owner, on_lost=tell)
    lease = await unless_draining(context, taking)
    if lease is None:
        yield None
        return
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_end_when_lost(lease, lost), name=f"lease {name}")
            yield lease
            watch.cancel()
    finally:
        await lease.release()


async def _end_when_lost(lease: Lease, lost: asyncio.Event) -> None:
    await lost.wait()
    lease.check()
    raise LeaseLostError(f"lease {lease.name} (token {lease.token}) was lost; this process must stop")
