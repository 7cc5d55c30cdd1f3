"""A run whose first publication takes so long that all that comes is over age: it catches up when that is done.

On two GPUs the first broadcast took six seconds, the trainer of a small model was three versions further, each batch was masked
whole, no step made new weights any more, and so none were ever offered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, stub_overrides
from tests.bench.processes import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

STEPS = 12
HOOK = ROOT / "tests" / "publication_hooks.py"


async def test_training_goes_on_when_the_publication_that_held_it_is_done(tmp_path: Path) -> None:
    run = ChaosRun(
        RECIPE, tmp_path, "held",
        [*stub_overrides(tmp_path / "stub.jsonl"), f"stop.steps={STEPS}", "engines.policy.count=1",
         f"checkpoint.after_publish.hook={HOOK}:hold_the_first", "checkpoint.after_publish.timeout_s=150"],
    )  # fmt: skip
    try:
        await run.up()
        found = await run.ended()
    finally:
        run.stop()
    assert (found["steps"], found["account"]["imbalance"], found["account"]["double_trained"]) == (STEPS, 0, 0)
    assert found["account"]["masked"] >= 3 * 16, "three batches whole, before the hook let go"
    assert found["max_trained_age"] <= found["age_bound"]
