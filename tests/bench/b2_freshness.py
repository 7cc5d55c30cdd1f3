"""B2, the freshness frontier: what an age bound costs, by K, for ours, strict FIFO and wait, in the same run.

    ours          age.admission count, consumption mask: nothing waits, tokens over the bound lose their gradient
    strict FIFO   age.consumption wait, as the product has it: batches in the order of admission
    wait          no step leaves a group behind whose first token would then be over the bound; it needs to know which
                  weights began each group under way, which no trainer does: an oracle, for comparison

The latency model is B1's at a quarter of its size (2 of 8 engines, 512 of 2048 executions a batch: the same ratios), with a
clock that runs 40 times faster. Ages are checked against what the engines made, token by token.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from tests.bench.age_line import Spec
from tests.bench.age_measure import Measured
from tests.bench.age_runs import busy_processes, run_all
from tests.bench.plots import draw_b2

PLOT: Final = Path(__file__).parents[2] / "docs" / "b2-freshness.png"
_POLICIES: Final = ("ours", "fifo", "wait")
_AT_ONCE: Final = 3
"""The policies of one K beside each other; more where there are two cores for each."""


def specs(size: str) -> list[Spec]:
    """Every policy at every K, those of one K beside each other."""
    bounds = (2, 4) if size == "smoke" else (1, 2, 4, 6, 8)
    return [_spec(size, k, policy) for k in bounds for policy in _POLICIES]


def _spec(size: str, k: int, policy: str) -> Spec:
    smoke = size == "smoke"
    return Spec(
        name=f"{policy}-{k}",
        k=k,
        policy="wait" if policy == "wait" else "ours",
        options=["age.consumption=wait"] if policy == "fifo" else [],
        engines=1 if smoke else 2,
        groups=32 if smoke else 64,
        speedup=100.0 if smoke else 40.0,
        warm_steps=5 if smoke else 14,  # the longest answer takes six steps
        steps=6 if smoke else 14,
    )


async def measure(size: str) -> dict[str, Any]:
    """The fields of B2."""
    wanted = specs(size)
    before = busy_processes()
    found = await run_all(wanted, max(_AT_ONCE, len(os.sched_getaffinity(0)) // 2))
    bounds = sorted({spec.k for spec in wanted})
    model = wanted[0].model
    rows = [_row(k, model.mean_limit_s, *(found[f"{policy}-{k}"] for policy in _POLICIES)) for k in bounds]
    result: dict[str, Any] = {
        "executions_per_batch": model.batch,
        "engines": model.engines,
        "speedup": wanted[0].speedup,
        "steps": wanted[0].steps,
        "scale": f"{model.batch / 2048:g} of 8 engines x 128 slots and 256 groups x 8",
        "host_load": {"before": before, "after": busy_processes()},
        "rows": rows,
    }
    result["plot"] = draw_b2(rows, PLOT) if size == "full" else None
    return result


def _row(k: int, limit_s: float, ours: Measured, fifo: Measured, wait: Measured) -> dict[str, Any]:
    return {
        "k": k,
        "step_s": round(ours.step_s, 2),
        "limit_s": round(limit_s, 2),
        "batches_limit_s": round(ours.limit_s, 2),
        "strict_fifo_step_s": round(fifo.step_s, 2),
        "wait_step_s": round(wait.step_s, 2),
        "trained_tokens_per_s": round(ours.trained_tokens_per_s),
        "strict_fifo_trained_tokens_per_s": round(fifo.trained_tokens_per_s),
        "over_age_tokens_trained": ours.over_age_tokens_trained,
        "executions_lost": ours.executions_lost,
        "tokens_masked_share": round(ours.tokens_masked_share, 4),
        "length_ratio": round(ours.length_ratio, 3),
        "tail_share_samples": round(ours.tail_share_samples, 3),
        "tail_share_tokens": round(ours.tail_share_tokens, 3),
        "trainer_idle": round(ours.trainer_idle, 4),
        "strict_fifo_trainer_idle": round(fifo.trainer_idle, 4),
        "wait_trainer_idle": round(wait.trainer_idle, 4),
        "strict_fifo_batches_limit_s": round(fifo.limit_s, 2),
        "wait_batches_limit_s": round(wait.limit_s, 2),
        "wait_trained_tokens_per_s": round(wait.trained_tokens_per_s),
        "strict_fifo_masked_share": round(fifo.tokens_masked_share, 4),
        "wait_masked_share": round(wait.tokens_masked_share, 4),
        "max_trained_age": ours.max_trained_age,
        "bus_share": round(ours.bus_share, 4),
    }
