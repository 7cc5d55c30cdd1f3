"""The bus tax benchmark runs, prints what it promises, stays within a hundredth of a one-second sample, and is flat."""

from __future__ import annotations

from typing import Final

import pytest

from tests.bench import bus_tax

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

ACTOR_MIB: Final = 16.0
"""Three quarters of 10^5 samples of 1 KiB are 75 MiB of bodies: who keeps even a quarter of each is seen."""
SERVER_MIB: Final = 192.0
"""The server remembers the message ids of its duplicate window, 2 minutes of them, and caches blocks: a plateau."""


async def test_every_field_is_measured() -> None:
    found = await bus_tax.measure("smoke")
    assert [row["size_bytes"] for row in found["rows"]] == [1 << 10, 100 << 10, 10 << 20]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in ("end_to_end_per_s", "consume_per_s", "cpu_us_per_sample"))
    assert found["fsync_per_s"] > 0 and found["memcpy_gib_s"] > 0
    assert found["rows"][0]["cpu_us_per_sample"] < 10_000


async def test_memory_is_flat_over_a_hundred_thousand_samples() -> None:
    found = await bus_tax.measure("flat")
    assert found["samples"] >= 100_000
    growth = dict(found["rss_growth_by_process"])
    assert growth.pop("bus") < SERVER_MIB, found
    assert max(growth.values()) < ACTOR_MIB, found
