"""M2PO: the second moment of the log-ratios of the whole batch is held below a threshold by masking outliers.

Invariant: the mean of (log p_train - log p_engine)^2 over the kept tokens is at most the threshold, and no more tokens
are masked than that needs (up to the width of a bin with the histogram).

The cutoff belongs to the batch, so this comes in three parts: what each rank knows (`log_ratio_histogram`, which adds
up, or the values themselves), the cutoff, and the mask.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction, kept_tokens
from physarum.actors.trainer.algorithms.masked import counted, masked, summed

NOTHING = -1.0
"""The cutoff below which no token lies: even the smallest second moment is above the threshold."""

BINS_PER_OCTAVE = 8
_LOWEST, _HIGHEST = -40, 20
"""Bins reach from 2^-40 to 2^20 nats^2; log-ratios beyond 2^10 nats share the last one."""


def second_moments(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(log p_train - log p_engine)^2, detached, float64 [T]; 0 where masked."""
    return masked((train_logprobs - engine_logprobs).detach().double(), mask).square()


def exact_cutoff(moments: Tensor, threshold: float) -> Tensor:
    """The largest value v such that the mean of all moments <= v is at most `threshold`; NOTHING where there is none.

    `moments` [k]: those of all trained tokens of the batch (gathered from all ranks, in any order).
    """
    ascending, counts = torch.unique(moments, sorted=True, return_counts=True)
    return _cutoff(ascending, counts.double(), ascending * counts, threshold)


def log_ratio_histogram(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Tokens and summed second moment per logarithmic bin, float64 [bins, 2]; adds up over microbatches and ranks."""
    moments = second_moments(train_logprobs, engine_logprobs, mask)
    edges = _edges(moments.device)
    bins = torch.bucketize(moments, edges).clamp(max=len(edges) - 1)
    columns = torch.stack([mask.double(), moments], 1)
    return torch.zeros(len(edges), 2, dtype=torch.float64, device=moments.device).index_add(0, bins, columns)


def histogram_cutoff(histogram: Tensor, threshold: float) -> Tensor:
    """As `exact_cutoff`, rounded down to the edge of a bin (9 % apart): never lets the mean exceed `threshold`."""
    return _cutoff(_edges(histogram.device), histogram[:, 0], histogram[:, 1], threshold)


def second_moment_mask(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cutoff: Tensor) -> Correction:
    """Rejects tokens whose second moment is above `cutoff` (scalar of the whole batch).

    M2PO, arXiv 2510.01161: the tokens with the largest (log r)^2 are masked until the mean of the rest is at most
    tau (0.04 in the paper), in place of a clip. Weights are 1: the loss has the ratio itself (cispo.py with a high cap,
    or policy_loss with wide clips, old log-probabilities from the engine). Sums: `m2po_rejected`, `m2po_moment`.
    """
    moments = second_moments(train_logprobs, engine_logprobs, mask)
    kept = moments <= cutoff
    return kept_tokens(
        mask, kept, {"m2po_rejected": counted(mask & ~kept), "m2po_moment": summed(moments, mask & kept)}
    )


def _edges(device: torch.device) -> Tensor:
    """Upper edges of the bins, the first one 0 (on-policy), the last one infinite."""
    exponents = torch.arange(_LOWEST * BINS_PER_OCTAVE, _HIGHEST * BINS_PER_OCTAVE + 1, device=device)
    powers = torch.exp2(exponents.double() / BINS_PER_OCTAVE)
    return torch.cat([powers.new_zeros(1), powers, powers.new_full((1,), torch.inf)])


def _cutoff(upper: Tensor, counts: Tensor, totals: Tensor, threshold: float) -> Tensor:
    """The last of ascending values whose cumulated mean is within the threshold; a cumulated mean never falls."""
    within = totals.cumsum(0) <= threshold * counts.cumsum(0)
    largest = torch.where(within, upper.double(), NOTHING)
    return largest.max() if len(largest) else largest.new_full((), NOTHING)
