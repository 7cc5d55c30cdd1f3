"""Some workers on one bus: all of them get tasks, soon, and none hears everybody's heartbeats."""

from __future__ import annotations

import pytest

from tests.bench import crowd

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


async def test_nobody_starves_and_a_task_is_soon_with_a_worker() -> None:
    [row] = (await crowd.measure("smoke"))["rows"]
    assert row["tasks_per_worker_least"] >= 1 and row["messages_left"] == 0
    assert row["assigned_p99_ms"] < 2_000 and row["refilled_p99_ms"] < 2_000
    assert 0 < row["server_cores_saturated"] < 1
