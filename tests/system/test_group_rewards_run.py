"""A whole run whose groups are compared, with more members issued than needed: the trainer's groups are the compared ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, stub_overrides

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(280)]

HOOKS = Path(__file__).parents[1] / "group_hooks.py"
ENOUGH, STEPS, GROUPS = 3, 8, 8


async def summary_of(place: Path, partitions: int, *options: str) -> dict[str, Any]:
    group = {"hook": f"{HOOKS}:in_order", "partitions": partitions}
    hook = f"reward.group={orjson.dumps(group).decode()}"
    stubs = stub_overrides(place / "stub.jsonl")
    run = ChaosRun(RECIPE, place, "grouped", [*stubs, hook, f"stop.steps={STEPS}", *options])
    try:
        await run.up()
        return await run.ended()
    finally:
        run.stop()


@pytest.mark.parametrize("partitions", [1, 4])
async def test_a_run_trains_the_first_members_that_were_compared_and_accounts_for_the_rest(
    tmp_path: Path, partitions: int
) -> None:
    found = await summary_of(
        tmp_path,
        partitions,
        "reward.count=2",
        f"groups.enough={ENOUGH}",
        "source.group_size=5",
        f"trainer.groups_per_batch={GROUPS}",
    )
    account = found["account"]
    assert account["imbalance"] == account["double_trained"] == 0
    assert account["dropped_by_reason"].keys() <= {"late", "uncompared"}
    assert (found["steps"], account["trained"]) == (STEPS, STEPS * GROUPS * ENOUGH)
