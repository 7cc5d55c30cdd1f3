"""Rotary positions of packed sequences.

Invariant: token t of the pack gets the frequencies of its position within its own segment. Whoever asks for angles hands in
the pack's layout right before, also where a layer runs a second time for its backward pass.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from physarum.actors.trainer.megatron.layout import PackedLayout


class _OfLayout:
    """Keeps the positions [T] of the layout that Megatron asks the longest length of."""

    _positions: Tensor

    def get_rotary_seq_len(
        self, _context: Any, _block: Any, _input: Any, _config: Any, packed_seq_params: PackedLayout
    ) -> int:
        """Length of the longest segment."""
        self._positions = packed_seq_params.positions
        return int(packed_seq_params.max_seqlen_q)


class PackedRotaryEmbedding(_OfLayout, RotaryEmbedding):
    """Megatron's RotaryEmbedding, answering with one row per packed token instead of one per position."""

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """[T, 1, rotary dimensions]: angles of every token, float32; Megatron multiplies them with [T, heads, d]."""
        return self.get_emb(max_seq_len, offset)[:, 0].index_select(0, self._positions)


class PackedYarnRotaryEmbedding(_OfLayout, YarnRotaryEmbedding):
    """The same of Megatron's YarnRotaryEmbedding."""

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> tuple[Tensor, float]:
        """As PackedRotaryEmbedding, and the scale of cosines and sines."""
        angles, scale = self.get_emb(max_seq_len, offset)
        return angles[:, 0].index_select(0, self._positions), scale


def pack_rotary(module: torch.nn.Module) -> None:
    """Every rotary embedding that `module` was built with (its base, scaling and interpolation) answers per token."""
    for owner in list(module.modules()):
        for name, child in owner.named_children():
            if isinstance(child, RotaryEmbedding):
                setattr(owner, name, _adopted(child))


def _adopted(embedding: RotaryEmbedding) -> RotaryEmbedding:
    kind = PackedYarnRotaryEmbedding if isinstance(embedding, YarnRotaryEmbedding) else PackedRotaryEmbedding
    packed = kind.__new__(kind)
    torch.nn.Module.__init__(packed)
    packed.__dict__.update(embedding.__dict__)
    return packed
