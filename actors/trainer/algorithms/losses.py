"""Per-token losses.

Invariant: a masked-out token contributes exactly zero to value and gradient, whatever its inputs hold (inf, NaN);
nothing is averaged here: reduction.py does that, with a denominator over the whole batch.
"""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with separate lower and upper clip ("clip-higher").

    ratio = exp(logprobs - old_logprobs);  loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A):
    PPO arXiv 1707.06347 eq. 7; clip-higher: DAPO arXiv 2503.14476 eq. 10.

    All tensors [T]; `mask` bool, True where the token is trained. Gradient flows through `logprobs` only.
    Returns the loss per token [T] (0 where masked) and *sums* over trained tokens: `clipped` (tokens whose gradient the
    clip cut), `ratio` (sum of ratios).
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), zero)
    advantage = torch.where(mask, advantages.to(logprobs.dtype), zero)
    ratio = log_ratio.exp()
    free = ratio * advantage
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    loss = torch.where(mask, -torch.minimum(free, clipped), zero)
    with torch.no_grad():
        sums = {"clipped": ((clipped < free) & mask).sum(), "ratio": torch.where(mask, ratio, zero).sum()}
    return loss, sums


def sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy per token, -log p(token | prefix), [T]; 0 where `mask` is False."""
    return torch.where(mask, -logprobs, torch.zeros((), dtype=logprobs.dtype, device=logprobs.device))
