"""Replay of top-p and top-k sampling: log-probabilities over the set of tokens that the engine kept.

Invariant: trainer and engine mean the same distribution: one that is renormalised over the recorded set. A row without
a record is normalised over the whole vocabulary, as the engine did where it cut nothing. "Keep sampling mask" of
DeepSeek-V3.2, arXiv 2512.02556 section 3.1: against the trainer's full softmax every ratio would be biased.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_CUT = -1e9
"""The logit of a token that was not kept: its probability is exactly 0, and finite, so 0 times it is 0."""


@dataclass(frozen=True)
class KeptRows:
    """The kept sets of N rows, ragged: row i kept ids[offsets[i] : offsets[i + 1]], an empty one has no record."""

    offsets: Tensor
    """[N + 1] int64, on the host."""
    ids: Tensor
    """[M] int64, where the logits are; counted from the shard's first column."""

    def shifted(self, start: int) -> "KeptRows":
        """For the shard that begins at column `start`."""
        return KeptRows(self.offsets, self.ids - start)

    def part(self, start: int, stop: int) -> "KeptRows":
        """Rows start to stop."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return KeptRows(offsets - first, self.ids[first:last])

    def cut(self, logits: Tensor, columns: Tensor) -> Tensor:
        """`logits` [N, V], in place: what was not kept has probability 0. `columns` [N]: the target of each row, which is
        always kept, counted as `ids`; those of other shards are passed over. Memory: N * V bytes."""
        counts = self.offsets.diff()
        rows, width = logits.shape
        row = torch.repeat_interleave(torch.arange(rows), counts).to(logits.device)
        allowed = (counts == 0).to(logits.device)[:, None].repeat(1, width)
        for at, column in ((row, self.ids), (torch.arange(rows, device=logits.device), columns)):
            here = (column >= 0) & (column < width)
            allowed[at[here], column[here]] = True
        return logits.masked_fill_(~allowed, _CUT)
