"""Normalising values over a whole batch, in two halves with an all-reduce between them.

Invariant: moments add up over microbatches and ranks, so every rank scales by the same numbers and the halves of one
sequence cannot be scaled differently.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import counted, masked, summed

EPSILON = 1e-8
"""Added to the variance, so that equal values become 0 and not NaN (as in TRL, verl)."""


class Moments(NamedTuple):
    """What a mean and a variance are made of; scalars, float64.

    Over ranks: all-reduce torch.stack(moments) and make Moments of its three entries.
    """

    tokens: Tensor
    total: Tensor
    squares: Tensor

    def joined(self, other: "Moments") -> "Moments":
        """Moments of both parts together."""
        return Moments(self.tokens + other.tokens, self.total + other.total, self.squares + other.squares)

    def mean(self) -> Tensor:
        """Mean; 0 of nothing."""
        return self.total / self.tokens.clamp(min=1.0)

    def variance(self) -> Tensor:
        """Unbiased variance (n - 1); 0 for fewer than two values."""
        centred = (self.squares - self.total * self.mean()).clamp(min=0.0)
        return centred / (self.tokens - 1.0).clamp(min=1.0)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of `values` where `mask` is True, any shape."""
    return Moments(counted(mask), summed(values, mask), summed(values.double().square(), mask))


def whiten(values: Tensor, mask: Tensor, batch: Moments, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) with the moments of the whole batch; float32, same shape, 0 where masked.

    `shift_mean` False keeps the mean (x / std), for rewards whose zero means something. Advantage normalisation as in
    PPO's reference implementation; over the whole batch in REINFORCE++ (arXiv 2501.03262).
    """
    centred = masked(values.detach().double(), mask) - (batch.mean() if shift_mean else 0.0)
    return masked((centred / torch.sqrt(batch.variance() + EPSILON)).float(), mask)
