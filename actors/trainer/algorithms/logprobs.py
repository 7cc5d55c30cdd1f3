"""Log-probabilities of given tokens, and the entropy of the distribution, from logits.

Invariant: computed in float32 (float64 for float64 logits) whatever the logits' type; columns past the vocabulary
(padding) have probability zero and gradient zero; the tensor-parallel form equals the plain one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, both [T], in nats.

    `logits` [T, V], `targets` [T] int64; columns >= `vocab_size` are padding. `temperature` is the one that the engine
    sampled with, so that both sides mean the same distribution. Only the log-probability is differentiable.
    """
    limit = logits.size(-1) if vocab_size is None else vocab_size
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature, 0, limit, None)
    return logprobs, entropy


def vocab_parallel_logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The same for logits [T, V / ranks] split over the vocabulary; every rank of `group` gets the whole answer [T].

    Rank r holds the columns [r, r + 1) * V / ranks. Three small all-reduces of [T] instead of a gather of [T, V], as in
    Megatron-LM (arXiv 1909.08053, section 3).
    """
    start = dist.get_rank(group) * logits.size(-1)
    logprobs, entropy = _TokenLogprobs.apply(logits, targets, temperature, start, vocab_size, group)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Saves the softmax only: d log p_t / d logits = (onehot(t) - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        valid = max(0, min(logits.size(-1), vocab_size - start))
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scaled = logits[:, :valid].to(precision) / temperature
        peak = scaled.amax(-1) if valid else scaled.new_full((len(scaled),), -torch.inf)
        peak = _all_reduce(peak, dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        column = targets - start
        here = (column >= 0) & (column < valid)
        column = torch.where(here, column, 0)
        own = scaled.gather(1, column[:, None])[:, 0] if valid else peak.new_zeros(len(scaled))
        picked = _all_reduce(torch.where(here, own, 0.0), dist.ReduceOp.SUM, group)
        softmax = scaled.exp()
        normaliser = _all_reduce(softmax.sum(-1), dist.ReduceOp.SUM, group)
        softmax /= normaliser[:, None]
        mean_logit = _all_reduce((softmax * scaled).sum(-1), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(softmax, column, here)
        ctx.temperature, ctx.columns, ctx.dtype = temperature, logits.size(-1), logits.dtype
        log_normaliser = normaliser.log()
        entropy = log_normaliser - mean_logit
        ctx.mark_non_differentiable(entropy)
        return picked - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, here = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        inner = softmax * -scale[:, None]
        if softmax.size(1):
            inner.scatter_add_(1, column[:, None], torch.where(here, scale, 0.0)[:, None])
        grad = inner.to(ctx.dtype)
        missing = ctx.columns - grad.size(1)
        if missing:
            grad = torch.nn.functional.pad(grad, (0, missing))
        return grad, None, None, None, None, None


def _all_reduce(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
