"""Importance weights p_train / p_engine: per token, per sequence, geometric; truncated, clipped or masked.

Invariant: on-policy (equal log-probabilities) every weight is exactly 1 and nothing is masked, for bounds around 1.
Weights are detached; per-sequence ratios need whole sequences, or their sums all-reduced over the ranks that share one.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction, kept_tokens
from physarum.actors.trainer.algorithms.masked import MAX_LOG_RATIO, bounded_log_ratio, counted, masked, summed
from physarum.actors.trainer.algorithms.sequences import Sequences, SequenceSums, sequence_sums, spread

SequenceLevel = Literal["sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
Bound = float | Tensor
"""One bound for all tokens, or one for each, [T] (age_aware.by_age makes them from ages)."""


def truncated_importance_weights(train_logprobs: Tensor, engine_logprobs: Tensor, cap: Bound) -> Tensor:
    """Truncated importance sampling: w = min(exp(log p_train - log p_engine), cap), detached, [T].

    TIS as in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), after
    Ionides 2008. `cap` > 0; the weight of an on-policy token is 1.
    """
    return (train_logprobs.detach() - engine_logprobs.detach()).exp().clamp(max=cap)


def importance_weights(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(log p_train - log p_engine) per token, detached, [T]; log-ratio cut to +-20 nats, weight 0 where masked."""
    ratio = bounded_log_ratio(train_logprobs.detach(), engine_logprobs, mask).exp()
    return masked(ratio, mask)


def sequence_importance_weights(sums: SequenceSums, mask: Tensor, sequences: Sequences, level: SequenceLevel) -> Tensor:
    """A ratio per sequence on each of its tokens, float32 [T]; 0 where masked.

    "sequence": exp(sum of log-ratios), the unbiased weight of the whole response; "geometric": exp(mean of log-ratios),
    biased, but its variance does not grow with length. MIS of slime and verl's rollout correction ("When Speed Kills
    Stability", Liu et al. 2025). `sums` from sequences.log_ratio_sums. The exponent is cut to +-20 nats.
    """
    exponent = sums.total if level == "sequence" else sums.mean()
    return spread(exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach().float(), mask, sequences)


def bounded_weights(
    weights: Tensor, mask: Tensor, mode: Mode, high: Bound, low: Bound = 0.0, name: str = "importance"
) -> Correction:
    """Weights kept within [low, high].

    "truncate": min(w, high) (`low` unused); "clip": to [low, high]; "mask": outside them the token is rejected, inside
    it keeps its weight. With a weight per sequence all its tokens share one fate (if the bounds are the same for all).
    Sums: `<name>_low`, `<name>_high` (tokens outside), `<name>_weight` (sum of the resulting weights).
    """
    below = (weights < low) & mask if mode != "truncate" else torch.zeros_like(mask)
    above = (weights > high) & mask
    kept = mask & ~(below | above) if mode == "mask" else mask
    inside = weights if mode == "mask" else _upper(weights, high)
    inside = _lower(inside, low) if mode == "clip" else inside
    result = masked(inside.detach(), kept)
    sums = {
        f"{name}_low": counted(below),
        f"{name}_high": counted(above),
        f"{name}_weight": summed(result, kept),
    }
    return Correction(result, kept, sums)


def veto_counts(
    train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """Tokens per sequence with p_train / p_engine < `threshold` (e.g. 1e-4), float64 [n]; adds up over parts."""
    catastrophic = masked((train_logprobs - engine_logprobs).detach(), mask) < math.log(threshold)
    return sequence_sums(catastrophic.double(), mask, sequences).total


def veto(mask: Tensor, sequences: Sequences, counts: Tensor) -> Correction:
    """Rejects every sequence with at least one catastrophic token (`counts` [n] from `veto_counts`).

    The veto threshold of slime's and verl's rollout correction: the trainer finds such a token all but impossible, so
    the sequence was hardly made by a policy near its own. Sums: `vetoed` (tokens rejected).
    """
    clean = (counts == 0)[sequences.ids]
    return kept_tokens(mask, clean, {"vetoed": counted(mask & ~clean)})


def weight_totals(correction: Correction, sequences: Sequences | None = None) -> Tensor:
    """[sum of weights, number], float64 [2], over tokens, or with `sequences` over sequences (each its mean weight).

    Adds up over microbatches and ranks.
    """
    if sequences is None:
        return torch.stack([summed(correction.weights, correction.mask), counted(correction.mask)])
    sums = sequence_sums(correction.weights, correction.mask, sequences)
    return torch.stack([sums.mean().sum(), counted(sums.tokens > 0)])


def normalized_weights(correction: Correction, totals: Tensor) -> Correction:
    """Weights divided by their mean over the batch (self-normalised importance sampling); [T].

    `totals` [2]: `weight_totals` of the whole batch. Keeps the step's size when most weights are truncated. As
    "batch normalise" of verl's rollout correction. Weights that are all 0 stay 0.
    """
    mean = totals[0] / totals[1].clamp(min=1.0)
    scale = torch.where(mean > 0, 1.0 / mean, 1.0).to(correction.weights.dtype)
    return Correction(correction.weights * scale, correction.mask, correction.sums)


def _upper(weights: Tensor, bound: Bound) -> Tensor:
    return torch.minimum(weights, torch.as_tensor(bound, dtype=weights.dtype, device=weights.device))


def _lower(weights: Tensor, bound: Bound) -> Tensor:
    return torch.maximum(weights, torch.as_tensor(bound, dtype=weights.dtype, device=weights.device))
