"""B1, the tail bubble: what long answers cost synchronous, one-step-off and fully asynchronous training (K = 4).

The three runs use the same latency model (latency.py), lengths, actors and bus:

    ours           age.admission count, consumption mask, as the product does by default
    one step off   one batch is generated while the one before it is trained; the next begins when both are done
    sync           generation, then training, each on all devices (twice the engines, half the training time)

limit_s = max(train, tokens / throughput + pause) for a batch of the mean length, which is what generation must make for each;
batches_limit_s: for the tokens of the batches that were trained in these few steps; window_limit_s: the larger of training
what was trained and generating what was generated in them, which no schedule of the same work can undercut. Times are model
seconds: the clock runs `speedup` times faster, so that what the bus and the trainer's records cost weighs `speedup` times as
much as it would (`bus_share` of the trainer's time); it is part of step_s, and not of the limits. The synchronous run issues
a whole batch at a time, which the bus does not spread over the step; sync_model_s is the same without any bus.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean
from typing import Any, Final

from tests.bench import age_hooks
from tests.bench.age_line import Spec
from tests.bench.age_runs import busy_processes, run_all
from tests.bench.plots import draw_b1

K: Final = 4
PLOT: Final = Path(__file__).parents[2] / "docs" / "b1-tail-bubble.png"
_CORES_FOR_ALL: Final = 8
"""With fewer the runs that are compared with ours go first, and ours has the machine for itself."""
_SYNC: Final = ["age.consumption=mask"]
_ONE_STEP_OFF: Final = ["age.consumption=train"]


def specs(size: str) -> list[Spec]:
    """Smoke: an eighth of the engines, slots and batch, and a faster clock."""
    if size == "smoke":
        small = {"engines": 1, "groups": 32, "speedup": 100.0}
        return [
            Spec(name="ours", k=K, warm_steps=6, steps=6, **small),
            Spec(name="sync", k=0, devices=2, options=_SYNC, warm_steps=1, steps=3, **small),
            Spec(
                name="one_step_off", k=0, policy="one_step_off", options=_ONE_STEP_OFF, warm_steps=2, steps=3, **small
            ),
        ]
    return [
        # The first batch takes as long as six steps, which is the longest answer's time; eight more follow unmeasured.
        Spec(name="ours", k=K, speedup=6.5, warm_steps=8, steps=16),
        Spec(name="sync", k=0, devices=2, options=_SYNC, speedup=8.0, warm_steps=1, steps=4),
        Spec(
            name="one_step_off", k=0, policy="one_step_off", options=_ONE_STEP_OFF, speedup=8.0, warm_steps=2, steps=4
        ),
    ]


async def measure(size: str) -> dict[str, Any]:
    """The fields of B1."""
    ours, *others = specs(size)
    before = busy_processes()
    if size == "smoke" or len(os.sched_getaffinity(0)) >= _CORES_FOR_ALL:
        found = await run_all([ours, *others], at_once=3)
    else:  # ours alone: what is measured to a hundredth shares the machine with nobody
        found = await run_all(others, at_once=2) | await run_all([ours], at_once=1)
    our, sync, off = found["ours"], found["sync"], found["one_step_off"]
    ideal_s = _synchronous_s(next(spec for spec in others if spec.name == "sync"))
    limit_s = ours.model.mean_limit_s
    result = {
        "k": K,
        "step_s": round(our.step_s, 2),
        "limit_s": round(limit_s, 2),
        "batches_limit_s": round(our.limit_s, 2),
        "window_limit_s": round(our.window_limit_s, 2),
        "sync_step_s": round(sync.step_s, 2),
        "one_step_off_step_s": round(off.step_s, 2),
        "trainer_idle": round(our.trainer_idle, 4),
        "slot_idle": round(our.slot_idle, 4),
        "max_trained_age": our.max_trained_age,
        "of_limit": round(limit_s / our.step_s, 4),
        "of_batches_limit": round(our.limit_s / our.step_s, 4),
        "of_window_limit": round(our.window_limit_s / our.step_s, 4),
        "times_sync": round(sync.step_s / our.step_s, 3),
        "sync_model_s": round(ideal_s, 2),
        "times_sync_model": round(ideal_s / our.step_s, 3),
        "bus_share": round(our.bus_share, 4),
        "tokens_masked_share": round(our.tokens_masked_share, 4),
        "executions_per_s": round(our.executions_per_s, 1),
        "executions_lost": sum(one.executions_lost for one in found.values()),
        "sync_slot_idle": round(sync.slot_idle, 4),
        "one_step_off_slot_idle": round(off.slot_idle, 4),
        "one_step_off_trainer_idle": round(off.trainer_idle, 4),
        "host_load": {"before": before, "after": busy_processes()},
        "model": _described(ours),
    }
    result["plot"] = draw_b1(result, PLOT) if size == "full" else None
    return result


def _synchronous_s(spec: Spec) -> float:
    """The mean step of the same batches without a bus: what the synchronous run would take if its bursts cost nothing."""
    model = spec.model
    batches = range(spec.warm_steps, spec.warm_steps + spec.steps)
    return mean(model.synchronous_s(age_hooks.batch_keys(batch, model)) for batch in batches)


def _described(spec: Spec) -> dict[str, float]:
    model = spec.model
    return {
        "engines": model.engines,
        "slots_per_engine": model.slots,
        "executions_per_batch": model.batch,
        "mean_tokens": round(model.mean_length, 1),
        "speedup": spec.speedup,
        "steps": spec.steps,
    }
