"""Logits of a few chosen token ids per row, from the whole vocabulary or from its shards.

Invariant: every rank of a tensor-parallel group gets all chosen logits, and the gradient returns to the one shard that
owns each column; absent ids (-1) give -inf and take no gradient.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.algorithms.logprobs import all_reduce


def chosen_logits(logits: Tensor, ids: Tensor, temperature: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """logits[row, ids] / temperature, [T, K] in float32 (float64 for float64 logits); -inf where the id is -1.

    `logits` [T, V], or [T, V / ranks] with `group`, rank r holding the columns [r, r + 1) * V / ranks; `ids` [T, K]
    int64, below the vocabulary's size. One all-reduce of [T, K].
    """
    start = 0 if group is None else dist.get_rank(group) * logits.size(-1)
    return cast("Tensor", _ChosenLogits.apply(logits, ids, temperature, start, group))  # type: ignore[no-untyped-call]


class _ChosenLogits(torch.autograd.Function):
    """Each chosen column lies on one rank only, so a sum over ranks gathers it and its gradient needs no reduction."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, start: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        column = ids - start
        here = (ids >= 0) & (column >= 0) & (column < logits.size(-1))
        column = torch.where(here, column, 0)
        own = torch.where(here, logits.gather(1, column).to(precision) / temperature, 0.0)
        ctx.save_for_backward(column, here)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        return torch.where(ids >= 0, all_reduce(own, dist.ReduceOp.SUM, group), -torch.inf)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        column, here = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=grads[0].dtype, device=column.device)
        grad.scatter_add_(1, column, torch.where(here, grads[0] / ctx.temperature, 0.0))
        return grad.to(ctx.dtype), None, None, None, None
