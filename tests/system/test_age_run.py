"""Whole runs with stub engines whose tokens know their weights: at K = 0 nothing older than the newest weights is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, stub_overrides

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(280)]


async def summary_of(place: Path, name: str, *options: str) -> dict[str, Any]:
    run = ChaosRun(
        RECIPE, place, name, [*stub_overrides(place / "stub.jsonl"), "age.bound=0", "stop.steps=8", *options]
    )
    try:
        await run.up()
        return await run.ended()
    finally:
        run.stop()


@pytest.mark.parametrize("admission", ["pace", "count"])
async def test_who_waits_for_the_newest_weights_masks_nothing_and_drops_nothing(tmp_path: Path, admission: str) -> None:
    """Tasks are issued only once the newest weights are served, so that all their tokens are of these."""
    found = await summary_of(tmp_path, admission, f"age.admission={admission}")
    assert (found["steps"], found["max_trained_age"]) == (8, 0)
    assert found["freshness"]["masked_share"] == 0
    assert found["account"]["imbalance"] == found["account"]["dropped"] == 0


async def test_what_is_too_old_is_dropped_or_cut_off_by_name_and_the_account_closes(tmp_path: Path) -> None:
    """Free admission lets tasks out whatever the engines serve."""
    options = ["age.admission=free", "age.consumption=drop", "age.in_flight=abort", "groups.refills=3"]
    found = await summary_of(tmp_path, "dropping", *options)
    account = found["account"]
    assert (found["steps"], found["max_trained_age"], found["freshness"]["masked_share"]) == (8, 0, 0)
    assert account["imbalance"] == account["double_trained"] == 0
    assert account["dropped_by_reason"].keys() <= {"over_age", "hopeless", "late"}
    assert account["dropped_by_reason"].get("over_age", 0) + account["dropped_by_reason"].get("hopeless", 0) > 0
