"""One engine of two nodes in a supervised run: whichever part dies, all parts are started anew, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.bus.presence import Roster
from tests.bench.chaos import RECIPE
from tests.bench.chaos_check import Journal, wrong_tokens
from tests.bench.chaos_run import SERVER, ChaosRun, stub_overrides
from tests.bench.chaos_watch import Watch

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]
STEPS = 12


async def test_an_engine_is_all_of_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    options = [*stub_overrides(path), "engines.policy.count=1", "engines.policy.nodes=2", f"stop.steps={STEPS}"]
    run = ChaosRun(RECIPE, tmp_path, "nodes", options)
    engine, node = "policy-0", "policy-0-node-1"
    try:
        await run.up()
        bus = await run.connect()
        try:
            watch = Watch(bus, Roster(bus))
            async with watch.open():
                await watch.until_number(2, 120)
                for number, victim in enumerate((node + SERVER, engine + SERVER, node, engine), 1):
                    before = {name: run.pid(name + SERVER) for name in (engine, node)}
                    actor = run.pid(engine)
                    run.kill(victim)
                    await watch.until_ready(engine, actor, 60)
                    assert all(run.pid(name + SERVER) != pid for name, pid in before.items()), victim
                    await watch.until_number(2 + 2 * number, 120)
                await watch.until_number(STEPS, 120)
                executions = list(watch.executions)
        finally:
            await bus.close()
        summary = await run.ended()
    finally:
        run.stop()
    journal = Journal(path)
    journal.read_on()
    assert summary["account"]["imbalance"] == 0 and summary["account"]["dead"] == 0
    assert executions and sum(wrong_tokens(one, journal) for one in executions) == 0
