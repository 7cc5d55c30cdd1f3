"""A slot that is one episode idles less than one that is a group, and than a place in a synchronous batch: on real engines."""

from __future__ import annotations

import pytest

from tests.bench import tail_slots

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_slots_of_single_episodes_are_busy() -> None:
    found = await tail_slots.measure("smoke")
    assert [row["slot"] for row in found["rows"]] == ["samples", "groups", "sync"]
    assert found["samples_slot_idle"] < 0.1 < min(found["groups_slot_idle"], found["sync_slot_idle"])
    assert all(row["oldest_trained"] <= 4 for row in found["rows"])
