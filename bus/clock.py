"""How far a host's clock is from the bus's: what ends at a time of day for several hosts needs clocks that agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final, NamedTuple

from physarum.bus import names
from physarum.bus.connection import Bus

_TRIES: Final = 3


class Offset(NamedTuple):
    """Seconds by which this host's clock is ahead of the server's, to within `uncertain_s`: half of the way there and back."""

    ahead_s: float
    uncertain_s: float


async def offset(bus: Bus, clock: Callable[[], float] = time.time) -> Offset:
    """The most certain of three (Cristian, 1989). Raises BusError."""
    found = [await _asked(bus, clock) for _ in range(_TRIES)]
    return min(found, key=lambda one: one.uncertain_s)


async def _asked(bus: Bus, clock: Callable[[], float]) -> Offset:
    before, began = clock(), time.monotonic()
    answer = await bus.api(f"STREAM.INFO.{names.stream(bus.run, 'presence')}")
    half_s = (time.monotonic() - began) / 2
    return Offset(before + half_s - datetime.fromisoformat(answer["ts"]).timestamp(), half_s)
