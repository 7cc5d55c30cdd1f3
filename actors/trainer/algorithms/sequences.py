"""Tokens of several whole sequences in one row, and sums per sequence.

Invariant: nothing depends on the order in which sequences are packed, and sums per sequence add up over ranks that each
hold a part of the tokens (context parallelism): compute locally, all-reduce, apply.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


@dataclass(frozen=True)
class Sequences:
    """Which sequence each of T tokens belongs to. A sequence's tokens stand in their order, others may lie between."""

    ids: Tensor
    """[T] int64 in [0, count)."""
    count: int
    """Number of sequences n; given, because reading it from `ids` would wait for the device."""


class SequenceSums(NamedTuple):
    """Sum of a value and number of tokens per sequence; both add up over parts of a sequence (all-reduce each)."""

    total: Tensor
    """[n] float64."""
    tokens: Tensor
    """[n] float64."""

    def mean(self) -> Tensor:
        """Mean per sequence, [n]; 0 for a sequence without tokens."""
        return self.total / self.tokens.clamp(min=1.0)


def sequence_sums(values: Tensor, mask: Tensor, sequences: Sequences) -> SequenceSums:
    """Sums of `values` [T] over the tokens with `mask` True, per sequence, in float64; differentiable in `values`."""
    zeros = torch.zeros(sequences.count, dtype=torch.float64, device=values.device)
    total = zeros.index_add(0, sequences.ids, masked(values, mask).double())
    return SequenceSums(total, zeros.index_add(0, sequences.ids, mask.double()))


def log_ratio_sums(numerator: Tensor, denominator: Tensor, mask: Tensor, sequences: Sequences) -> SequenceSums:
    """Sums of log(p / q) from log p (`numerator`) and log q (`denominator`), [T]; gradient through the numerator only.

    Not cut per token, so that parts add up; whoever takes exp of them cuts them first (masked.MAX_LOG_RATIO).
    """
    return sequence_sums(numerator - denominator.detach(), mask, sequences)


def spread(per_sequence: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """One value per sequence [n] put on each of its tokens, [T]; 0 where `mask` is False."""
    return masked(per_sequence[sequences.ids], mask)


def place_at_end(per_sequence: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """One value per sequence [n] put on its last token with `mask` True, [T]; elsewhere 0.

    With ids of turns for ids of sequences it places a reward per turn. A sequence without a trained token has no place
    for its value and nothing to learn from it.
    """
    places = padded_places(mask, sequences)
    ends = places.index[places.column == places.lengths[places.owner] - 1]
    result = torch.zeros(mask.shape, dtype=per_sequence.dtype, device=mask.device)
    return result.index_copy(0, ends, per_sequence[sequences.ids[ends]])


@dataclass(frozen=True)
class PaddedPlaces:
    """Where each token with mask True lies in a rectangle [n, longest]; k = tokens with mask True."""

    index: Tensor
    """[k] place in the row of T tokens."""
    owner: Tensor
    """[k] sequence."""
    column: Tensor
    """[k] how many trained tokens of the same sequence come before."""
    lengths: Tensor
    """[n] trained tokens per sequence."""

    def pad(self, values: Tensor) -> Tensor:
        """[T] -> [n, longest] float64, zeros behind each sequence."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        padded = torch.zeros(len(self.lengths), longest, dtype=torch.float64, device=values.device)
        padded[self.owner, self.column] = values[self.index].double()
        return padded

    def unpad(self, padded: Tensor, tokens: int) -> Tensor:
        """[n, longest] -> [T = `tokens`] float32, zeros where the mask is False."""
        result = torch.zeros(tokens, dtype=torch.float32, device=padded.device)
        result[self.index] = padded[self.owner, self.column].float()
        return result


def padded_places(mask: Tensor, sequences: Sequences) -> PaddedPlaces:
    """Places of the tokens with `mask` True, each sequence in a row of its own; masked tokens take no column."""
    index = mask.nonzero()[:, 0]
    index = index[torch.argsort(sequences.ids[index], stable=True)]
    owner = sequences.ids[index]
    lengths = torch.bincount(owner, minlength=sequences.count)
    starts = lengths.cumsum(0) - lengths
    return PaddedPlaces(index, owner, torch.arange(len(index), device=mask.device) - starts[owner], lengths)
