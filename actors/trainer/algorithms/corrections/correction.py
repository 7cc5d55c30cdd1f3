"""What every off-policy correction returns, and how several act together.

Invariant: weights are detached and 0 outside the mask; a correction only takes tokens away, never adds one; sums add up
over microbatches and ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


class Correction(NamedTuple):
    """Weights and mask for T tokens.

    Tokens that a correction rejects stay in the loss's denominator as long as its weights (reduction.py) were counted
    from the mask before it: rejecting then makes the step smaller, and the other tokens' weight does not depend on who
    is rejected. To leave them out, count the weights from `mask` again, over the whole batch.
    """

    weights: Tensor
    """[T] factor of the token's loss, detached; 0 where `mask` is False."""
    mask: Tensor
    """[T] bool: tokens still trained."""
    sums: dict[str, Tensor]
    """Sums over tokens (or sequences where the name says so), scalars."""

    def applied(self, loss: Tensor) -> Tensor:
        """loss * weight, [T]; 0 with gradient 0 where rejected."""
        return masked(loss, self.mask) * self.weights


def identity(mask: Tensor, dtype: torch.dtype = torch.float32) -> Correction:
    """No correction: weight 1 on every trained token."""
    return Correction(mask.to(dtype), mask, {})


def kept_tokens(mask: Tensor, kept: Tensor, sums: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Correction:
    """Weight 1 on tokens in `mask` and `kept`, the rest rejected."""
    remaining = mask & kept
    return Correction(remaining.to(dtype), remaining, sums)


def combined(*corrections: Correction) -> Correction:
    """All of them at once: weights multiply, masks intersect, sums stand side by side.

    Raises ValueError where two use the same name for a sum (give importance corrections different names).
    """
    first, *others = corrections
    weights, mask, sums = first.weights, first.mask, dict(first.sums)
    for other in others:
        twice = sums.keys() & other.sums.keys()
        if twice:
            raise ValueError(f"two corrections report {sorted(twice)}; expected different names (argument name=)")
        mask = mask & other.mask
        weights = weights * other.weights
        sums |= other.sums
    return Correction(masked(weights, mask), mask, sums)
