"""From per-token losses to the batch's loss, with a denominator counted over the whole batch.

Invariant: the loss is a plain sum of weighted token losses; weights come from global counts, so the result does not
depend on how the batch is split over microbatches or ranks.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token-mean", "execution-mean", "sequence-mean", "sequence-sum", "constant-length"]


def sequence_weights(
    trained_tokens: Sequence[int],
    executions: Sequence[int],
    reduction: Reduction,
    constant_tokens: int | None = None,
) -> list[float]:
    """Weight of every token of each sequence, one float per sequence.

    `trained_tokens` [n]: tokens with mask True in each sequence; `executions` [n]: the execution it belongs to.
    "Active" are sequences and executions with a trained token; a sequence without has weight 0 where it would divide.
    - "token-mean": 1 / all trained tokens (DAPO, arXiv 2503.14476 eq. 8): each token counts the same.
    - "execution-mean": 1 / (trained tokens of its execution * active executions): each execution counts the same,
      whatever its length and however many samples it yielded (GRPO, arXiv 2402.03300 eq. 3).
    - "sequence-mean": 1 / (its trained tokens * active sequences): each sample counts the same (slime's default).
    - "sequence-sum": 1 / active sequences: the sum over a sample's tokens, averaged over samples.
    - "constant-length": 1 / (`constant_tokens` * active executions): the sum over an execution's tokens divided by a
      length that is the same for all, so that length is neither rewarded nor punished (Dr. GRPO, arXiv 2503.20783).
    With the first three, weights times trained tokens add up to 1. Raises ValueError where nothing is trained, and
    where `constant_tokens` is missing, not positive, or given to another reduction.
    """
    per_execution: dict[int, int] = {}
    for tokens, execution in zip(trained_tokens, executions, strict=True):
        per_execution[execution] = per_execution.get(execution, 0) + tokens
    total = sum(per_execution.values())
    if total == 0:
        raise ValueError(f"none of {len(trained_tokens)} sequences has a trained token; expected at least one")
    _check_constant(reduction, constant_tokens)
    active_sequences = sum(1 for tokens in trained_tokens if tokens)
    active_executions = sum(1 for tokens in per_execution.values() if tokens)
    per_sequence = [per_execution[execution] for execution in executions]
    if reduction == "token-mean":
        return [1.0 / total] * len(trained_tokens)
    if reduction == "execution-mean":
        return [_inverse(tokens * active_executions) for tokens in per_sequence]
    if reduction == "sequence-mean":
        return [_inverse(tokens * active_sequences) for tokens in trained_tokens]
    if reduction == "sequence-sum":
        return [1.0 / active_sequences] * len(trained_tokens)
    return [_inverse((constant_tokens or 0) * active_executions)] * len(trained_tokens)


def _inverse(denominator: int) -> float:
    return 1.0 / denominator if denominator else 0.0


def _check_constant(reduction: Reduction, constant_tokens: int | None) -> None:
    wanted = reduction == "constant-length"
    given = constant_tokens is not None
    if wanted != given or (constant_tokens is not None and constant_tokens <= 0):
        raise ValueError(
            f"reduction is {reduction} and constant_tokens {constant_tokens}; expected a positive number of tokens with "
            "constant-length, and none with another reduction"
        )


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * values) over tokens with `mask` True, all [T] -> scalar.

    Masked-out values are replaced by zero *before* the multiplication: inf * 0 would be NaN.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return (torch.where(mask, values, zero) * weights).sum()
