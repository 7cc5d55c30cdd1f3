"""How many messages wait in each queue of a run."""

from __future__ import annotations

import asyncio
from typing import Final

from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.names import StreamKey

QUEUES: Final[tuple[StreamKey, ...]] = ("tasks", "episodes", "samples")


async def depths(bus: Bus) -> dict[str, int]:
    """Messages by stream; a stream that cannot be read now is left out."""
    found = await asyncio.gather(*(_depth(bus, key) for key in QUEUES))
    return {key: count for key, count in zip(QUEUES, found, strict=True) if count is not None}


async def _depth(bus: Bus, key: StreamKey) -> int | None:
    try:
        return (await log.state(bus, key)).messages
    except BusError:
        return None
