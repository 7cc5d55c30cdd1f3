"""Rotary positions of packed sequences.

Invariant: token t of the pack gets the frequencies of its position within its own segment.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


class PackedRotaryEmbedding(RotaryEmbedding):
    """Megatron's RotaryEmbedding, answering with one row per packed token instead of one per position.

    `positions` [T] is set by the forward pass before the model runs (`forward_rows`); the caller of `forward` inside
    GPTModel only knows the longest segment.
    """

    positions: Tensor

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """[T, 1, rotary dimensions]: angles of every token, float32; Megatron multiplies them with [T, heads, d]."""
        return self.get_emb(max_seq_len, offset)[:, 0].index_select(0, self.positions)

    @classmethod
    def adopt(cls, embedding: RotaryEmbedding) -> "PackedRotaryEmbedding":
        """The embedding that a GPTModel built (its base, scaling and interpolation), made to answer per token."""
        packed = cls.__new__(cls)
        torch.nn.Module.__init__(packed)
        packed.__dict__.update(embedding.__dict__)
        return packed
