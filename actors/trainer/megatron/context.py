"""How the ranks of a context-parallel group share a pack of sequences.

Invariant: a pure function of the lengths, so every rank knows who holds what without talking. Each segment is cut into
2 * size equal chunks and rank r holds the r-th from the front and the r-th from the back: as many tokens and as much
causal attention for each (zigzag, as in Megatron and arXiv 2407.21783 section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor

Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class ContextShard:
    """Part `rank` of `size`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def unit(self) -> int:
        """Segments are padded to a multiple of it."""
        return 2 * self.size


@dataclass(frozen=True)
class SharedRows:
    """How rows that lie on different ranks come together, in the order of the whole."""

    per_rank: int
    """Rows of the rank that has most; the others pad."""
    order: Tensor
    """[N] place of each row when all ranks' rows are put one after another."""
    group: dist.ProcessGroup

    def whole(self, own: Tensor) -> Tensor:
        """[n, ...] of this rank -> [N, ...] of all, on every rank; collective.

        Everybody goes on to compute the same from the whole, so in the backward pass each rank takes the gradient of
        its own rows; nothing is summed.
        """
        padded = F.pad(own, (0, 0) * (own.dim() - 1) + (0, self.per_rank - len(own)))
        everyone: Tensor = gather_from_sequence_parallel_region(
            padded, tensor_parallel_output_grad=False, group=self.group
        )
        return everyone.index_select(0, self.order)


def owners(lengths: Sequence[int], size: int) -> Indices:
    """[T] rank that holds each token of segments with `lengths` (multiples of 2 * size), packed without gaps."""
    chunks = [np.arange(length) // (length // (2 * size)) for length in lengths]
    chunk = np.concatenate(chunks)
    return np.minimum(chunk, 2 * size - 1 - chunk)


def places(owner: Indices, size: int, per_rank: int) -> Indices:
    """[n] where each item stands when the parts of all ranks, `per_rank` long, are put one after another.

    A rank keeps its items in their order.
    """
    result = owner * per_rank
    for rank in range(size):
        own = owner == rank
        result[own] += np.arange(int(own.sum()))
    return result
