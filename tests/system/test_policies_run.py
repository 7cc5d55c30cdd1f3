"""Two policies in one run, as a user starts it: engines, trainers and versions of each, and a trainer that is killed.

On stub engines every token says which weights made it; on real ones both policies learn.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
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
RECIPE, RELAY = ROOT / "tests" / "policies.yaml", ROOT / "configs" / "calculator_relay.yaml"
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
    check_commands(tmp_path, found)


def actorctl(place: Path, *words: str, status: int = 0) -> Any:
    """What a command on the finished run says, as JSON; its error where it is to fail."""
    command = [sys.executable, "-m", "physarum.actors.actorctl", *words, "--root", str(place), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr


def check_commands(place: Path, found: dict[str, Any]) -> None:
    """Each finds the policy that is meant."""
    counted = actorctl(place, "ledger", "two", "--recount")
    assert counted["policies"][SOLVER] == found["policies"][SOLVER]["account"]
    assert actorctl(place, "ledger", "two") == counted, "the summary says the same"
    seen = actorctl(place, "weights", "ls", "two", "--policy", SOLVER)
    assert {one["label"].partition("@")[0] for one in seen["versions"]} == {SOLVER} and seen["head"].startswith(SOLVER)
    (step,) = [
        one for one in actorctl(place, "ledger", "two", "--step", "20", "--policy", SOLVER)["steps"] if one["changed"]
    ]
    version = actorctl(place, "ledger", "two", "--version", f"{SOLVER}@{step['epoch']}.20")
    assert version["made_by"] == step["plan"]
    saved = actorctl(place, "checkpoints", "verify", "two", "--policy", SOLVER)["checkpoints"]
    assert all(one["fault"] == "" for one in saved) and len(saved) > 1
    label = f"{SOLVER}@{saved[-1]['name']}"
    actorctl(place, "checkpoints", "export-hf", "two", str(place / "exported"), "--checkpoint", label)
    model = Path(found["policies"][SOLVER]["model_dir"])
    assert (place / "exported" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert "trains policy, solver; expected one policy" in actorctl(
        place, "fork", "two", "--at-step", "5", "--run", "x", status=2
    )
    assert "trains no policy 'solve'" in actorctl(place, "checkpoints", "ls", "two", "--policy", "solve", status=5)


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


@pytest.mark.timeout(900)
def test_both_policies_of_the_relay_are_trained_on_real_engines(tmp_path: Path) -> None:
    """The ready recipe, shorter: real SGLang and Megatron for both, the reader's trainer killed on the way. The caller learns
    to call; the reader has no part where it guessed."""
    run = QuickstartRun(tmp_path, "relay", "stop.steps=30", "evaluation.problems=64", config=RELAY)
    killed: list[int] = []

    def kill(step: int) -> None:
        if step >= 10 and not killed:
            killed.append(run.pid("trainer-reader-0"))
            run.kill("trainer-reader-0")

    try:
        assert run.read(kill) == 0, run.output[-4000:]
    finally:
        run.end()
    found, reader = run.summary, run.summary["policies"]["reader"]
    for one in (found, reader):
        account = one["account"]
        assert (account["imbalance"], account["double_trained"], account["dead"]) == (0, 0, 0)
        assert (Path(one["model_dir"]) / "model.safetensors").is_file()
    assert killed and found["steps"] == 30 and reader["steps"] >= 3
    assert found["account"]["dropped"] == 0 and reader["account"]["dropped_by_reason"].keys() == {"absent"}
    assert found["reward_start"] < 0.35 and found["reward_end"] > 0.6
    weights = [(Path(one["model_dir"]) / "model.safetensors").read_bytes() for one in (found, reader)]
    assert weights[0] != weights[1], "from one start model"
