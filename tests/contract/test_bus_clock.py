"""A host's clock against the bus's."""

from __future__ import annotations

import time

import pytest

from physarum.actors.supervisor.clocks import MOST_APART_S, refuse_other_times
from physarum.actors.supervisor.errors import MachineRefusedError
from physarum.bus.clock import offset
from physarum.bus.connection import Bus


async def test_how_far_a_clock_is_from_the_servers_is_found(bus: Bus) -> None:
    for ahead_s in (0.0, 30.0, -30.0):
        found = await offset(bus, lambda ahead_s=ahead_s: time.time() + ahead_s)  # type: ignore[misc]
        assert abs(found.ahead_s - ahead_s) <= found.uncertain_s + 0.01


@pytest.mark.parametrize(("ahead_s", "words"), [(30.0, "30.0 s ahead of"), (-30.0, "30.0 s behind")])
async def test_a_host_of_another_time_takes_no_part(bus: Bus, ahead_s: float, words: str) -> None:
    """One whose clock was ahead by a broadcast's limit took part in none and said nothing."""
    await refuse_other_times(bus, lambda: time.time() + MOST_APART_S / 2)
    with pytest.raises(MachineRefusedError, match=rf"clock is {words} the bus's, expected at most 2 s.*NTP"):
        await refuse_other_times(bus, lambda: time.time() + ahead_s)
