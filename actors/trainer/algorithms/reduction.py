"""From per-token losses to the batch's loss, with a denominator counted over the whole batch.

Invariant: the loss is a plain sum of weighted token losses; weights come from global counts, so the result does not
depend on how the batch is split over microbatches or ranks.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token-mean", "execution-mean"]


def sequence_weights(trained_tokens: Sequence[int], executions: Sequence[int], reduction: Reduction) -> list[float]:
    """Weight of every token of each sequence, one float per sequence.

    `trained_tokens` [n]: tokens with mask True in each sequence; `executions` [n]: the execution it belongs to.
    - "token-mean": 1 / all trained tokens (DAPO, arXiv 2503.14476 eq. 8): each token counts the same.
    - "execution-mean": 1 / (trained tokens of its execution * executions with a trained token): each execution counts
      the same, whatever its length and however many samples it yielded (GRPO, arXiv 2402.03300 eq. 3).
    Weights times trained tokens add up to 1. Raises ValueError where nothing is trained.
    """
    per_execution: dict[int, int] = {}
    for tokens, execution in zip(trained_tokens, executions, strict=True):
        per_execution[execution] = per_execution.get(execution, 0) + tokens
    total = sum(per_execution.values())
    if total == 0:
        raise ValueError(f"none of {len(trained_tokens)} sequences has a trained token; expected at least one")
    if reduction == "token-mean":
        return [1.0 / total] * len(trained_tokens)
    active = sum(1 for tokens in per_execution.values() if tokens)
    return [1.0 / (per_execution[execution] * active) if per_execution[execution] else 0.0 for execution in executions]


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * values) over tokens with `mask` True, all [T] -> scalar.

    Masked-out values are replaced by zero *before* the multiplication: inf * 0 would be NaN.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return (torch.where(mask, values, zero) * weights).sum()
