"""`actorctl weights rollback` on a run at work: engines fall back, training is held, goes on as a new epoch, and the account
closes with what was withdrawn."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from physarum.actors import states
from physarum.actors.tools.access import opened
from physarum.actors.trainer.recovery import recover
from physarum.bus import ledger
from physarum.bus.log import LogReader
from physarum.bus.register import Register
from physarum.bus.version import Version
from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, stub_overrides
from tests.bench.processes import ROOT, environment

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 80


def actorctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "physarum.actors.actorctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT)


async def durable_at(run: ChaosRun, number: int) -> Version:
    """The newest checkpoint once it is at `number` or later."""
    records: list[ledger.Numbered] = []
    async with (
        asyncio.timeout(120),
        opened(run.folder, "test") as visit,
        contextlib.aclosing(LogReader(visit.bus, "ledger", 1).batches()) as batches,
    ):
        async for batch in batches:
            records += [ledger.decode_entry(entry) for entry in batch]
            durable = recover(records).durable
            if durable is not None and durable.number >= number:
                return Version("policy", durable.epoch, durable.number)
    raise AssertionError("the ledger ended")


async def head_after(run: ChaosRun, epoch: int) -> states.Head:
    """The first head of a later epoch."""
    async with opened(run.folder, "test") as visit, asyncio.timeout(120):
        heads = Register(visit.bus, visit.publisher, "weights", states.Head)
        async with heads.watch(states.HEAD, "policy") as changed:
            while True:
                changed.clear()
                head = (await heads.get(states.HEAD, "policy")).value
                if head is not None and head.epoch > epoch:
                    return head
                await changed.wait()


async def test_a_run_goes_on_from_the_version_that_holds(tmp_path: Path) -> None:
    run = ChaosRun(
        RECIPE, tmp_path, "rolled",
        [*stub_overrides(tmp_path / "stub.jsonl"), f"stop.steps={STEPS}", "trainer.checkpoint_every=3",
         "checkpoint.keep_last=100", "age.bound=4"],
    )  # fmt: skip
    where = str(run.folder.path)
    try:
        await run.up()
        good = await durable_at(run, 3)
        await durable_at(run, good.number + 3)
        refused = actorctl("weights", "rollback", where, "policy@1.1")
        assert refused.returncode != 0 and f"{good}" in refused.stderr, refused.stderr
        done = actorctl("weights", "rollback", where, str(good), "--reason", "worse on the canary")
        assert done.returncode == 0, done.stderr
        head = await head_after(run, good.epoch)
        assert head.number == good.number  # engines get the good weights while training is held
        assert actorctl("weights", "resume", where).returncode == 0
        found = await run.ended()
    finally:
        run.stop()
    account = found["account"]
    assert account["imbalance"] == account["double_trained"] == 0 and found["steps"] == STEPS
    assert account["dropped_by_reason"]["withdrawn"] > 0
