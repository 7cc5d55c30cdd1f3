"""What is said of one step: its record in LEDGER, its event, and what the trainer shows. Pure but for the time of its end."""

from __future__ import annotations

import math
import time
from typing import Any

from physarum.actors.trainer.batch import StepResult
from physarum.actors.trainer.plan import Plan
from physarum.bus.ledger import StepRecord
from physarum.bus.version import Version


def step_record(
    version: Version,
    sequence: int,
    plan: Plan,
    result: StepResult | None,
    refused: str,
    waited_s: float,
    started_at: float,
) -> StepRecord:
    """The step that has just executed the plan recorded as `sequence`. `version`: the weights as they are now; `result` None:
    nothing was trained; `refused`: why not, "" where nothing was left to train. Times in Unix seconds."""
    done = result is not None
    return StepRecord(
        epoch=version.epoch,
        number=version.number,
        plan=sequence,
        changed=result is not None and result.changed,
        refused=refused,
        trained=plan.trained if done else 0,
        masked=len(plan.record.executions) if not done and not refused else plan.masked,
        tokens_trained=result.tokens_trained if result is not None else 0,
        tokens_masked=sum(item.masked_tokens for item in plan.record.executions),
        ages=plan.ages if done else {},
        multi_version_samples=plan.multi_version_samples,
        reward_mean=plan.reward_mean,
        wait_s=waited_s,
        started_at=started_at,
        finished_at=time.time(),
        metrics=dict(result.metrics) if result is not None else {},
    )


def shown(record: StepRecord) -> dict[str, float]:
    """The numbers in the trainer's heartbeat; NaN where a step has none."""
    return {
        "number": record.number,
        "reward": record.reward_mean if record.reward_mean is not None else math.nan,
        "loss": record.metrics.get("loss", math.nan),
    }


def step_event(record: StepRecord, steps_total: int | None, published: int) -> dict[str, Any]:
    """The body of the event `step`. `steps_total`: as in `stop.steps`; `published`: versions published so far."""
    return {
        "number": record.number,
        "steps_total": steps_total,
        "loss": record.metrics.get("loss"),
        "grad_norm": record.metrics.get("grad_norm"),
        "reward_mean": record.reward_mean,
        "tokens_trained": record.tokens_trained,
        "tokens_masked": record.tokens_masked,
        "ages": record.ages,
        "max_age": max(record.ages, default=0),
        "wait_s": record.wait_s,
        "seconds": record.finished_at - record.started_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "executions": record.trained + record.masked,
        "published": published,
        "metrics": record.metrics,
    }
