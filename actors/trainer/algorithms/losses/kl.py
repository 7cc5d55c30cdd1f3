"""Estimates of KL(policy || reference) per sampled token, for the loss or for the reward.

Invariant: a penalty stands either in the loss (with gradient) or in the reward (detached); never in both.
"""

from typing import Literal

from torch import Tensor

from physarum.actors.trainer.algorithms.masked import bounded_log_ratio, masked

KlKind = Literal["k1", "k2", "k3", "low-variance"]

LOW_VARIANCE_BOUND = 10.0
"""Upper bound of "low-variance", nats: a single token cannot dominate the batch (as in verl, slime)."""


def kl_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: KlKind) -> Tensor:
    """One-sample estimate per token, nats, [T]; 0 where masked. Gradient flows through `logprobs`.

    With d = log p - log p_ref (cut to +-20): k1 = d;  k2 = d^2 / 2;  k3 = exp(-d) - 1 + d;  "low-variance" = k3 cut at
    10. Schulman 2020, "Approximating KL divergence". k1 and k3 estimate the KL without bias, but as a *loss* k1 has
    expected gradient zero and k3 that of the forward KL; k2's is that of the reverse KL (on-policy). So k1 is for the
    reward, k2 or `unbiased_kl_penalty` for the loss. k2 against the engine's log-probabilities is half the squared
    log-ratio penalty of Kimi K2.5 (arXiv 2602.02276).
    """
    difference = bounded_log_ratio(logprobs, reference, mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    k3 = (-difference).exp() - 1.0 + difference
    return k3.clamp(max=LOW_VARIANCE_BOUND) if kind == "low-variance" else k3


def unbiased_kl_penalty(logprobs: Tensor, old_logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """(p / p_old) (p_ref / p - log(p_ref / p) - 1), nats, [T]; 0 where masked. Gradient flows through both factors.

    DeepSeek-V3.2, arXiv 2512.02556 section 3.1: k3 with the importance ratio, whose gradient is an unbiased estimate of
    that of KL(policy || reference) even where p is far below p_ref. `old_logprobs` are those of the sampling policy.
    """
    ratio = bounded_log_ratio(logprobs, old_logprobs, mask).exp()
    return ratio * kl_penalty(logprobs, reference, mask, "k3")


def penalized_rewards(
    rewards: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, coefficient: float, kind: KlKind = "k1"
) -> Tensor:
    """r_t - coefficient * KL_t, detached, [T]; 0 where masked: the penalty in the reward (PPO for RLHF, arXiv 2203.02155).

    `logprobs` are those of the policy that acted (engine or recomputed). Feeds gae.py or returns.py.
    """
    penalty = kl_penalty(logprobs.detach(), reference, mask, kind)
    return masked(rewards.detach().to(penalty.dtype), mask) - coefficient * penalty
