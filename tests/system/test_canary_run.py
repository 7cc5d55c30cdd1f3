"""A run whose canary refuses versions: they make no token but the canary's own, engines go back, and training ends exactly."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

import orjson
import pytest

from physarum.actors import states
from physarum.actors.tools.access import opened
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.weightsync.canary import Trial
from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, RunStuckError, stub_overrides
from tests.bench.processes import ROOT

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 30
HOOKS = ROOT / "tests" / "canary_gate.py"
REFUSED = list(range(3, STEPS, 4))


async def test_refused_versions_reach_no_other_engine(tmp_path: Path) -> None:
    journal = tmp_path / "stub.jsonl"
    run = ChaosRun(
        RECIPE, tmp_path, "tried",
        [*stub_overrides(journal), f"stop.steps={STEPS}", "age.bound=4", "engines.policy.count=3",
         f"engines.policy.canary.gate={HOOKS}:refuse",
         f"engines.policy.canary.args.numbers={REFUSED}",
         f"checkpoint.after_publish.hook={HOOKS}:note", f"checkpoint.after_publish.args.path={tmp_path / 'published'}",
         f"checkpoint.before_pull.hook={HOOKS}:note_and_fail_at_first",
         f"checkpoint.before_pull.args.path={tmp_path / 'pulled'}"],
    )  # fmt: skip
    try:
        await run.up()
        found = await run.ended()
        async with opened(run.folder, "test") as visit:
            trials = Register(visit.bus, visit.publisher, "weights", Trial)
            trial = (await trials.get(states.CANARY, "policy", "policy")).value
    finally:
        run.stop()
    assert found["account"]["imbalance"] == found["account"]["double_trained"] == 0 and found["steps"] == STEPS
    assert trial is not None and trial.passed is not None
    loaded = Counter(label for label in live_labels(journal) if label != "start")
    refused = [label for label in loaded if Version.parse(label).number in REFUSED]
    assert refused and all(loaded[label] == 1 for label in refused), "its canary alone"
    assert max(loaded.values()) >= 3, "what passed reached the others"
    published, pulled = ((tmp_path / name).read_text().split() for name in ("published", "pulled"))
    assert published == sorted(set(published), key=Version.parse) and published[-1] == f"policy@1.{STEPS}"
    assert set(loaded) <= set(pulled) <= set(published), (
        "each was asked for before it was loaded, again after a failure"
    )


async def test_a_first_version_that_is_refused_ends_the_run_by_name(tmp_path: Path) -> None:
    """Nothing could ever be served: the gate's reason and the remedy are its last words."""
    run = ChaosRun(
        RECIPE, tmp_path, "refused",
        [*stub_overrides(tmp_path / "stub.jsonl"), "stop.steps=3", "engines.policy.count=2",
         f"engines.policy.canary.gate={HOOKS}:refuse", "engines.policy.canary.args.numbers=[0]"],
    )  # fmt: skip
    try:
        await run.up()
        with contextlib.suppress(RunStuckError):  # there may be no summary
            await run.ended()
        last = run.tail()
    finally:
        run.stop()
    assert re.search(r"policy@1\.0 was refused by its canary \(policy-\d: number 0 is not wanted\)", last), last
    assert "correct engines.policy.canary" in last


def live_labels(journal: Path) -> list[str]:
    """Of every load of every engine, in order."""
    records = map(orjson.loads, journal.read_bytes().splitlines())
    return [str(record["label"]) for record in records if record["kind"] == "live"]
