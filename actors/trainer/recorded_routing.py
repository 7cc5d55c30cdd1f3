"""The experts that a pass over a batch took, put together from all ranks' routers.

Invariant: collective; every token of every sequence was routed on at least one rank in every layer, and ranks that hold the
same token took the same experts, so the maximum over all ranks is what was taken, whole and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.batch import Experts, TrainSequence
from physarum.actors.trainer.megatron.context import Indices
from physarum.actors.trainer.megatron.routing import Routing

_TOGETHER_BYTES: Final = 64 << 20
"""Put together at a time on the device."""


class RecordedRouting:
    """Of one rank: `mine[i]` are the indices of the sequences in its i-th microbatch. 2 bytes a choice, on the host."""

    def __init__(self, routing: Routing, sequences: Sequence[TrainSequence], mine: Sequence[Sequence[int]]) -> None:
        self._routing = routing
        self._ends = np.cumsum([one.length for one in sequences])
        self._taken = np.zeros((int(self._ends[-1]), routing.layers, routing.top_k), np.int16)
        """[all tokens of the batch, layers, top-k], the expert's id + 1; 0 where another rank has the token."""
        self._places = iter([self._of_microbatch(sequences, indices) for indices in mine])

    def add(self, origin: Indices, taken: Mapping[int, Tensor]) -> None:
        """What this rank's routers took in its next microbatch, by layer [t, top-k]; `origin` is the microbatch's."""
        places, seen = next(self._places), self._routing.seen(origin)
        real = np.flatnonzero(seen >= 0)
        for layer, experts in taken.items():
            self._taken[places[seen[real]], layer] = experts.cpu().numpy()[real] + 1

    def whole(self, device: torch.device) -> list[Experts]:
        """int16 [T - 1, layers, top-k] per sequence; a collective over all ranks."""
        flat = self._taken.reshape(-1).view(np.uint8)  # what two ranks hold is equal, so byte by byte is as good
        for start in range(0, len(flat), _TOGETHER_BYTES):
            piece = torch.from_numpy(flat[start : start + _TOGETHER_BYTES]).to(device, copy=True)
            dist.all_reduce(piece, dist.ReduceOp.MAX)
            flat[start : start + len(piece)] = piece.cpu().numpy()
        self._taken -= 1
        return [part[:-1] for part in np.split(self._taken, self._ends[:-1])]

    def _of_microbatch(self, sequences: Sequence[TrainSequence], indices: Sequence[int]) -> Indices:
        """Where each token of its sequences, one after another, is in the batch."""
        parts = [np.arange(self._ends[index] - sequences[index].length, self._ends[index]) for index in indices]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
