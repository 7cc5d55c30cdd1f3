"""The bus tax benchmark runs, prints what it promises, and stays within a hundredth of a one-second sample."""

from __future__ import annotations

import pytest

from tests.bench import bus_tax

pytestmark = [pytest.mark.bench, pytest.mark.timeout(240)]


async def test_every_field_is_measured() -> None:
    found = await bus_tax.measure("smoke")
    assert [row["size_bytes"] for row in found["rows"]] == [1 << 10, 100 << 10, 10 << 20]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in ("end_to_end_per_s", "consume_per_s", "cpu_us_per_sample"))
    assert found["fsync_per_s"] > 0 and found["memcpy_gib_s"] > 0
    assert found["rows"][0]["cpu_us_per_sample"] < 10_000
