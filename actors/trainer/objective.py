"""The loss of one microbatch and the sums behind the step's metrics, from log-probabilities.

Invariant: everything here adds up over microbatches and ranks (sums, one maximum); the division by counts happens once,
for the whole batch, in `step_metrics`.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.corrections import (
    mismatch_metrics,
    mismatch_sums,
    truncated_importance_weights,
)
from physarum.actors.trainer.algorithms.losses import policy_loss, sft_loss
from physarum.actors.trainer.algorithms.reduction import weighted_sum
from physarum.actors.trainer.world_config import WorldConfig

Objective = Literal["grpo", "sft"]

SUMS = ("loss", "tokens", "entropy", "clipped", "k1", "k3", "weight", "weight_squared", "truncated")
"""Order of the summed scalars in the vector that `microbatch_loss` returns."""


def microbatch_loss(
    config: WorldConfig, logprobs: Tensor, entropy: Tensor, engine: Tensor, advantages: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (scalar, with gradient), SUMS [len(SUMS)] float64 and max |log-probability difference| (scalar float64).

    All inputs [N] over trained tokens. "grpo": weighted PPO clip; with `old_logprobs` "recompute" the old policy is the
    trainer's own before this update (ratio 1 in value, its gradient is the policy gradient), with
    "engine" the ratio is against the engine's. `correction` "tis" scales every token by its truncated importance
    weight.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    sums = {"tokens": mask.sum(), "entropy": entropy.sum()}
    largest = logprobs.new_zeros((), dtype=torch.float64)
    if config.objective == "sft":
        loss = weighted_sum(sft_loss(logprobs, mask), mask, weights)
    else:
        old = logprobs.detach() if config.old_logprobs == "recompute" else engine
        per_token, clip = policy_loss(logprobs, old, advantages, mask, config.clip_low, config.clip_high)
        if config.correction == "tis":
            per_token = per_token * truncated_importance_weights(logprobs, engine, config.tis_cap)
        loss = weighted_sum(per_token, mask, weights)
        mismatch = mismatch_sums(logprobs, engine, mask, config.tis_cap)
        largest = mismatch.pop("max_logprob_diff")
        sums |= mismatch | {"clipped": clip["clipped"]}
    sums["loss"] = loss.detach()
    zero = loss.new_zeros(())
    vector = torch.stack([sums.get(name, zero).double() for name in SUMS])
    return loss, vector, largest


def step_metrics(config: WorldConfig, sums: Mapping[str, float], largest: float) -> dict[str, float]:
    """Metrics of a whole batch from its sums."""
    tokens = sums["tokens"]
    metrics = {"loss": sums["loss"], "tokens": tokens, "entropy": sums["entropy"] / tokens}
    if config.objective == "grpo":
        metrics |= mismatch_metrics({**sums, "max_logprob_diff": largest})
        metrics["clip_share"] = sums["clipped"] / tokens
        if config.correction == "none":
            metrics["tis_clipped_share"] = 0.0
    return metrics
