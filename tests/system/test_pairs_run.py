"""A run on prefill and decode servers, which take every version at their own moments: each token is of the weights it names.

The stub's tokens show it: over KV of other weights than its own a decode server says something else (stub_decoding.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from physarum.actors.supervisor.process import read_records
from physarum.bus.presence import Roster
from physarum.bus.records import Execution
from tests.bench.chaos import RECIPE
from tests.bench.chaos_check import Journal
from tests.bench.chaos_run import SERVER, ChaosRun, stub_overrides
from tests.bench.chaos_watch import Watch
from tests.stub_engine import stub_tokens

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]
STEPS = 14
PAIRS = [
    "engines.policy.count=1",
    "engines.policy.servers=[{role: prefill, count: 2}, {role: decode, count: 2, sglang: {stub-mean-tokens: 25}}]",
    "engines.policy.sglang.stub-step-ms=20",
]


def wrong(execution: Execution, journal: Journal) -> int:
    """Tokens that are not those of the weights that their span names."""
    found = 0
    for sample in execution.samples:
        labels = [span.version for span in sample.spans for _ in range(span.end - span.start)]
        for at in np.flatnonzero(sample.loss_mask).tolist():
            position = sample.prompt_len + at
            said = {stub_tokens.token(execution.task.id, position, one) for one in journal.weights[labels[at]]}
            found += int(sample.token_ids[position]) not in said
    return found


async def test_every_token_of_a_pair_is_of_the_weights_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    options = [*stub_overrides(path), *PAIRS, f"stop.steps={STEPS}"]
    run = ChaosRun(RECIPE, tmp_path, "pairs", options)
    try:
        await run.up()
        bus = await run.connect()
        try:
            watch = Watch(bus, Roster(bus))
            async with watch.open():
                await watch.until_number(4, 120)
                decode = next(one for one in read_records(run.folder.actors) if one.instance == "policy-3")
                run.kill("policy-0" + SERVER)  # a prefill server
                await watch.until_ready("policy-0", decode.pid, 60)
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
    made = sum(int(sample.loss_mask.sum()) for one in executions for sample in one.samples)
    versions = {span.version for one in executions for sample in one.samples for span in sample.spans}
    assert made > 1000 and len(versions) > 5
    assert sum(wrong(one, journal) for one in executions) == 0
