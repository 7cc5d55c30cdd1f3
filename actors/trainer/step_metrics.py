"""What a step says of age and selection besides its histogram: numbers by name in `StepRecord.metrics`."""

from __future__ import annotations

from physarum.actors.trainer.plan import Plan


def age_metrics(plan: Plan, publish_debt: int, selection: dict[str, float]) -> dict[str, float]:
    """`publish_debt`: weights that were trained and not yet published when the step began, in numbers; `over_age_tokens`:
    tokens with gradient over the bound (consumption `train`); `masked_share`: tokens that lost their gradient for their age,
    of all that could have had one; `dropped_by_age`: executions that left as over_age or hopeless; and `selection`."""
    masked = sum(item.masked_tokens for item in plan.record.executions)
    trained = sum(item.trained_tokens for item in plan.record.executions)
    return {
        "publish_debt": float(publish_debt),
        "over_age_tokens": float(plan.over_age),
        "masked_share": masked / (masked + trained) if masked else 0.0,
        "dropped_by_age": float(sum(gone.reason in ("over_age", "hopeless") for gone in plan.record.dropped)),
        **selection,
    }
