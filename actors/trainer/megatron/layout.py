"""How packed sequences lie in one microbatch: positions, segments, and groups of like length for attention.

Invariant: segments are ordered longest first (one of padding may follow) and cover all tokens; a group is a run of
neighbouring segments, padded in attention by at most an eighth, and padding is never seen by a real token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from physarum.actors.trainer.megatron.context import ContextShard, owners, places

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

    Megatron's rotary code gets no bounds of sequences: PackedRotaryEmbedding has already picked each token's angles, so
    it is one multiplication instead of a loop over segments, and the same on every part of a shared pack.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """[T / cp] position of each of this rank's tokens within its segment."""
    lengths: tuple[int, ...] = ()
    """Of the whole pack's segments, longest first."""
    shard: ContextShard | None = None
    order: Tensor | None = None
    """[T] place of each token when the parts of all ranks of `shard` are put one after another."""
    experts: Mapping[int, Tensor] | None = None
    """By layer with experts, [t, top-k]: those to take (routing.py); None: the routers choose."""

    @cached_property
    def bounds(self) -> Tensor:
        """[segments + 1] int32: where each segment begins in the pack, and the pack's end."""
        ends = [0, *accumulate(self.lengths)]
        return torch.tensor(ends, dtype=torch.int32).to(self.positions.device, non_blocking=True)

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """Of the whole pack; where it is shared only segments of equal length are grouped."""
        groups, first, start = [], 0, 0
        while first < len(self.lengths):
            share = 0 if self.shard is not None else self.lengths[first] // _PADDED_SHARE
            last = first
            while last < len(self.lengths) and 0 <= self.lengths[first] - self.lengths[last] <= share:
                last += 1
            group = _group(self.lengths[first:last], start, self.positions.device)
            groups.append(group)
            first, start = last, start + group.tokens
        return tuple(groups)


def pack_layout(
    lengths: Sequence[int],
    device: torch.device,
    shard: ContextShard | None = None,
    experts: Mapping[int, Tensor] | None = None,
) -> PackedLayout:
    """Layout of segments with `lengths`, longest first, packed without gaps; with `shard` multiples of `shard.unit`."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    order = None
    if shard is not None:
        owner = owners(lengths, shard.size)
        positions = positions[torch.from_numpy(np.flatnonzero(owner == shard.rank))]
        order = torch.from_numpy(places(owner, shard.size, len(positions))).to(device)
    return PackedLayout(
        qkv_format="thd",
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        lengths=tuple(lengths),
        shard=shard,
        order=order,
        experts=experts,
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
