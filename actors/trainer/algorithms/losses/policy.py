"""PPO's clipped surrogate per token.

Invariant: a masked-out token contributes exactly zero to value and gradient, whatever its inputs hold (inf, NaN);
nothing is averaged here: reduction.py does that, with a denominator over the whole batch.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import bounded_log_ratio, masked


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with separate lower and upper clip ("clip-higher") and dual clip.

    ratio = exp(logprobs - old_logprobs);  loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A):
    PPO arXiv 1707.06347 eq. 7; clip-higher: DAPO arXiv 2503.14476 eq. 10. With `dual_clip` c > 1 and A < 0 the loss is
    at most -c A, so that a large ratio cannot push without bound: arXiv 1912.09729 eq. 5. The log-ratio is cut to
    +-20 nats (masked.py).

    All tensors [T]; `mask` bool, True where the token is trained. Gradient flows through `logprobs` only.
    Returns the loss per token [T] (0 where masked) and *sums* over trained tokens: `clipped` (tokens whose gradient the
    clip cut), `dual_clipped` (those that the dual clip cut), `ratio` (sum of ratios). Raises ValueError for c <= 1.
    """
    ratio = bounded_log_ratio(logprobs, old_logprobs, mask).exp()
    advantage = masked(advantages.detach().to(logprobs.dtype), mask)
    return clipped_surrogate(ratio, advantage, mask, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate of any ratio (per token, per sequence), as `policy_loss` describes it.

    `ratio` and `advantage` [T] are finite where `mask` is False.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; expected more than 1 (it bounds ratios above the ordinary clip)")
    free = ratio * advantage
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    gain = torch.minimum(free, clipped)
    floor = None if dual_clip is None else torch.where(advantage < 0, dual_clip * advantage, -torch.inf)
    cut = torch.zeros_like(mask) if floor is None else (gain < floor) & mask
    gain = gain if floor is None else torch.maximum(gain, floor)
    with torch.no_grad():
        sums = {
            "clipped": ((clipped < free) & mask).sum(),
            "dual_clipped": cut.sum(),
            "ratio": masked(ratio, mask).sum(),
        }
    return masked(-gain, mask), sums
