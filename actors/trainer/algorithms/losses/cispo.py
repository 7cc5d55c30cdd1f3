"""CISPO: the importance weight is clipped and detached, so that no token loses its gradient.

Invariant: gradient = -clipped weight * advantage * grad log p for every trained token, also beyond the clip.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import bounded_log_ratio, masked


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log p, per token [T]; 0 where masked.

    CISPO of MiniMax-M1, arXiv 2506.13585 eq. 4 and 5 (the paper sets no lower bound: `clip_low` 1); sg stops the
    gradient. With `clip_low` 1 and `clip_high` c - 1 it is the truncated policy gradient that DPPO masks (dppo.py).
    Averaged per token over the batch. Sums: `clipped` (tokens with ratio outside), `ratio`.
    """
    ratio = bounded_log_ratio(logprobs, old_logprobs, mask).exp().detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantage = masked(advantages.detach().to(logprobs.dtype), mask)
    loss = -weight * advantage * masked(logprobs, mask)
    with torch.no_grad():
        sums = {"clipped": ((weight != ratio) & mask).sum(), "ratio": masked(ratio, mask).sum()}
    return loss, sums
