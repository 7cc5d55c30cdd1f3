"""SAPO: a smooth gate in place of the clip.

Invariant: on-policy the gradient is the policy gradient; away from ratio 1 it fades, and never ends abruptly.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import bounded_log_ratio, masked


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, per token [T]; 0 where masked.

    tau is `temperature_positive` where A > 0, else `temperature_negative` (larger fades sooner): Soft Adaptive Policy
    Optimization, arXiv 2511.20347. Sums: `ratio`. Raises ValueError for temperatures that are not positive.
    """
    if temperature_positive <= 0 or temperature_negative <= 0:
        raise ValueError(f"temperatures are {temperature_positive}, {temperature_negative}; expected more than 0")
    ratio = bounded_log_ratio(logprobs, old_logprobs, mask).exp()
    advantage = masked(advantages.detach().to(logprobs.dtype), mask)
    tau = torch.where(advantage > 0, temperature_positive, temperature_negative).to(logprobs.dtype)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return -gate * advantage, {"ratio": masked(ratio.detach(), mask).sum()}
