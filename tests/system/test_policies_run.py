"""Two policies in one run, as a user starts it: engines, trainers and versions of each, and a trainer that is killed.

On stub engines every token says which weights made it; on real ones both policies learn.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from quickstart_run import ROOT, QuickstartRun

from physarum.actors.tools.access import opened
from physarum.bus import ledger, names
from physarum.bus.connection import Bus
from physarum.bus.ledger import RollbackRecord, StepRecord
from physarum.bus.log import LogReader
from physarum.bus.presence import Roster
from tests.bench.chaos_check import Journal, wrong_tokens
from tests.bench.chaos_run import STUB, ChaosRun
from tests.bench.chaos_watch import Watch

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(280)]

SOLVER = "solver"
LEDGERS = {"policy": "", SOLVER: SOLVER}
RECIPE = ROOT / "tests" / "policies.yaml"
ALONE_EVERY = 5
LIMIT_S = 120.0


def stub(group: str, journal: Path) -> list[str]:
    return [
        f"engines.{group}.python={sys.executable}",
        f"engines.{group}.env.PYTHONPATH={STUB}",
        f"engines.{group}.sglang.stub-log={journal}",
    ]


async def until_steps(bus: Bus, policy: str, count: int) -> None:
    """Until a policy's ledger holds so many steps."""
    found = 0
    reader = LogReader(bus, names.ledger_of(policy))
    async with asyncio.timeout(LIMIT_S), aclosing(reader.batches(1.0)) as batches:
        async for batch in batches:
            found += sum(isinstance(ledger.decode_entry(entry).record, StepRecord) for entry in batch)
            if found >= count:
                return


def epochs(records: list[ledger.Numbered]) -> int:
    return sum(isinstance(item.record, RollbackRecord) for item in records)


async def test_each_policys_tokens_are_of_its_weights_and_its_trainer_dies_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "stub.jsonl")
    options = [*stub("policy", tmp_path / "stub.jsonl"), *stub(SOLVER, tmp_path / "stub.jsonl"), "stop.steps=24"]
    run = ChaosRun(RECIPE, tmp_path, "two", options)
    try:
        await run.up()
        bus = await run.connect()
        watch = Watch(bus, Roster(bus))
        async with watch.open():
            await until_steps(bus, SOLVER, 4)
            run.kill("trainer-solver-0")
            await until_steps(bus, "", 12)
            run.kill("trainer-0")
            await until_steps(bus, "", 16)
            executions = list(watch.executions)
        await bus.close()
        found = await run.ended()
        async with opened(run.folder, "test") as visit:
            books = {name: await ledger.read(visit.bus, key=names.ledger_of(key)) for name, key in LEDGERS.items()}
    finally:
        run.stop()
    journal.read_on()
    assert executions and sum(wrong_tokens(one, journal) for one in executions) == 0
    assert journal.ambiguous == ["start"], "before its first version an engine serves its policy's start model"
    assert {label.partition("@")[0] for label in journal.weights} == {"start", "policy", SOLVER}
    assert {name: epochs(records) for name, records in books.items()} == {"policy": 2, SOLVER: 2}
    check_accounts(found, steps=24)


def check_accounts(found: dict[str, Any], steps: int) -> None:
    """Both close; each policy has drops by name alone, and the proposer has part in every task."""
    own, other = found["account"], found["policies"][SOLVER]
    assert found["steps"] == steps and other["steps"] > steps // 2
    assert own["imbalance"] == own["double_trained"] == own["dead"] == 0 and own["dropped"] == 0
    account = other["account"]
    assert account["imbalance"] == account["double_trained"] == account["dead"] == 0
    assert account["issued"] == own["issued"] and account["dropped_by_reason"].keys() == {"absent"}
    settled = account["issued"] - account["in_flight"]
    assert abs(account["dropped"] - settled / ALONE_EVERY) <= own["in_flight"] + account["in_flight"]
    assert found["max_trained_age"] <= found["age_bound"] and other["max_trained_age"] <= other["age_bound"]


def test_both_policies_learn_on_real_engines(tmp_path: Path) -> None:
    """The calculator's task, each policy by itself in the same episode and with its own reward; the first is the quick start's.
    One trainer is killed on the way."""
    hooks = ROOT / "tests" / "policies_hooks.py"
    run = QuickstartRun(
        tmp_path, "both", "stop.steps=24", "evaluation=null", f"rollout.generate={hooks}:both_answer",
        f"reward.hook={hooks}:exact_matches", "engines.solver={policy: solver, sglang: {context-length: 512}}",
        "policies.solver.trainer.lr=3e-4", "policies.solver.trainer.groups_per_batch=8",
    )  # fmt: skip
    killed: list[int] = []

    def kill(step: int) -> None:
        if step >= 8 and not killed:
            killed.append(run.pid("trainer-solver-0"))
            run.kill("trainer-solver-0")

    try:
        assert run.read(kill) == 0, run.output[-4000:]
    finally:
        run.end()
    solver = run.summary["policies"][SOLVER]
    for one in (run.summary, solver):
        account = one["account"]
        assert (account["imbalance"], account["double_trained"], account["dead"], account["dropped"]) == (0, 0, 0, 0)
        assert one["steps"] >= 20
        assert (Path(one["model_dir"]) / "model.safetensors").is_file()
    assert killed and solver["reward_mean_last"] > 0.5, "the start model's is below 0.35"
    models = [json.loads((Path(one["model_dir"]) / "config.json").read_text()) for one in (run.summary, solver)]
    assert models[0]["vocab_size"] == models[1]["vocab_size"]
    weights = [(Path(one["model_dir"]) / "model.safetensors").read_bytes() for one in (run.summary, solver)]
    assert weights[0] != weights[1], "from one start model, by rewards of their own"
