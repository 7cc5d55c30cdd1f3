"""Hosts of a run must agree on the time: turns of engines that load, canaries' places and rounds of broadcast end at a time of
day, and each host reads it on its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from physarum.actors.supervisor.errors import MachineRefusedError
from physarum.bus.clock import offset
from physarum.bus.connection import Bus

MOST_APART_S: Final = 2.0


async def refuse_other_times(bus: Bus, clock: Callable[[], float] = time.time) -> None:
    """Raises MachineRefusedError where this host's clock is further from the bus's than that; BusError."""
    found = await offset(bus, clock)
    if abs(found.ahead_s) - found.uncertain_s > MOST_APART_S:
        way = "ahead of" if found.ahead_s > 0 else "behind"
        raise MachineRefusedError(
            f"this host's clock is {abs(found.ahead_s):.1f} s {way} the bus's, expected at most {MOST_APART_S:g} s: what"
            " hosts of a run wait for would be over too early or too late. Synchronise both (NTP), then start again"
        )
