"""DPPO: a trust region in probability, not in its ratio.

Invariant: only a token whose update would lead further out of the region is rejected (A > 0 and already more likely, or
A < 0 and already less likely); one that leads back in is kept, however far it is.
"""

from typing import Literal

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction, kept_tokens
from physarum.actors.trainer.algorithms.corrections.importance import Bound
from physarum.actors.trainer.algorithms.masked import counted, masked

Divergence = Literal["tv", "kl"]

_SMALLEST = 1e-12
"""Floor of 1 - p inside a logarithm."""


def divergence_mask(
    train_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: Bound,
    high: Bound,
    divergence: Divergence = "tv",
) -> Correction:
    """Rejects tokens outside the trust region of DPPO, arXiv 2602.04879, with binary divergences, [T].

    With p = p_train, q = p_engine of the sampled token: for A > 0 rejected if p > q and D > `high`; else if p < q and
    D > `low`. "tv": D = |p - q| (prime-rl's default, 0.2 and 0.2); "kl": D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    A ratio of 5 matters little where q = 0.001 and much where q = 0.2, hence the measure in probability. Weights are 1:
    the loss is cispo.py with `clip_low` 1 and a cap on the ratio (20 in verl), old log-probabilities from the engine;
    prime-rl adds a small squared log-ratio penalty (kl_penalty "k2" against the engine). Sums: `dppo_low`, `dppo_high`.
    """
    p = masked(train_logprobs.detach().double(), mask).exp()
    q = masked(engine_logprobs.detach().double(), mask).exp()
    distance = (p - q).abs() if divergence == "tv" else _bernoulli_kl(q, p)
    upward = masked(advantages.detach(), mask) > 0
    too_high = mask & upward & (p > q) & (distance > high)
    too_low = mask & ~upward & (p < q) & (distance > low)
    sums = {"dppo_low": counted(too_low), "dppo_high": counted(too_high)}
    return kept_tokens(mask, ~(too_low | too_high), sums)


def _bernoulli_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL of "this token or any other" under q against p, nats."""
    rest_q, rest_p = (1.0 - q).clamp(min=_SMALLEST), (1.0 - p).clamp(min=_SMALLEST)
    taken: Tensor = torch.special.xlogy(q, q) - torch.special.xlogy(q, p)
    return taken + rest_q * (rest_q / rest_p).log()
