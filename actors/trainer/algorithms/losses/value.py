"""The critic's loss per token.

Invariant: masked tokens contribute exactly zero; the worse of the clipped and the free error counts, as in PPO.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked, summed


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, [T]; 0 where masked.

    Value clipping of PPO's reference implementation ("The 37 Implementation Details of PPO", 9), with the factor 1/2.
    `old_values` [T] are the critic's when the advantages were computed, `returns` [T] those of gae.py; `clip` infinite
    switches the clip off. Sums: `value_clipped` (tokens whose gradient the clip cut), `squared_error`, `value`,
    `return`, `return_squared` (explained variance = 1 - mean squared error / variance of the returns).
    """
    value, target = masked(values, mask), masked(returns.detach().to(values.dtype), mask)
    old = masked(old_values.detach().to(values.dtype), mask)
    free = (value - target).square()
    clipped = (old + (value - old).clamp(-clip, clip) - target).square()
    loss = 0.5 * torch.maximum(free, clipped)
    sums = {
        "value_clipped": ((clipped > free) & mask).sum(),
        "squared_error": summed(free, mask),
        "value": summed(value, mask),
        "return": summed(target, mask),
        "return_squared": summed(target.double().square(), mask),
    }
    return loss, sums
