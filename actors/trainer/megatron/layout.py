"""How packed sequences lie in one microbatch: positions, segments, and groups of like length for attention.

Invariant: segments are ordered longest first and cover all tokens; a group is a run of neighbouring segments, padded
in attention by at most an eighth, and padding is never seen by a real token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_PADDED_SHARE = 8
"""Segments share a group while the longest exceeds them by at most 1/8: bounds wasted attention work to 12.5 %."""


@dataclass(frozen=True)
class SegmentGroup:
    """`count` neighbouring segments that one attention call computes as a batch padded to `width` tokens.

    `gather` [count * width] picks the padded batch's rows from the group's tokens (a pad repeats its segment's last
    token); `scatter` [tokens] picks the tokens back. Both None where all segments have `width` tokens.
    """

    start: int
    tokens: int
    count: int
    width: int
    gather: Tensor | None
    scatter: Tensor | None


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's THD parameters plus what our core attention and rotary embedding need.

    To Megatron's rotary code the pack is one sequence, whose frequencies PackedRotaryEmbedding has already picked by
    position: one multiplication instead of a loop over segments.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """[T] position of each token within its segment."""
    groups: tuple[SegmentGroup, ...] = ()


def pack_layout(lengths: Sequence[int], device: torch.device) -> PackedLayout:
    """Layout of segments with `lengths`, longest first, packed without gaps."""
    total = sum(lengths)
    bounds = torch.tensor([0, total], dtype=torch.int32)  # on the host: read by Megatron as Python numbers
    positions = torch.cat([torch.arange(length) for length in lengths])
    groups, first, start = [], 0, 0
    while first < len(lengths):
        last = first
        while last < len(lengths) and (lengths[first] - lengths[last]) * _PADDED_SHARE <= lengths[first]:
            last += 1
        group = _group(lengths[first:last], start, device)
        groups.append(group)
        first, start = last, start + group.tokens
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        groups=tuple(groups),
    )


def _group(lengths: Sequence[int], start: int, device: torch.device) -> SegmentGroup:
    width, tokens, count = lengths[0], sum(lengths), len(lengths)
    if lengths[-1] == width:
        return SegmentGroup(start, tokens, count, width, None, None)
    sizes = torch.tensor(lengths)
    offsets = sizes.cumsum(0) - sizes
    column = torch.arange(width)
    gather = offsets[:, None] + torch.minimum(column, sizes[:, None] - 1)
    real = column < sizes[:, None]
    return SegmentGroup(
        start, tokens, count, width, gather.flatten().to(device), real.flatten().nonzero()[:, 0].to(device)
    )
