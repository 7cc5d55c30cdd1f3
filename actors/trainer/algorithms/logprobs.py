"""Log-probabilities of given tokens, and the entropy of the distribution, from logits.

Invariant: computed in float32 (float64 for float64 logits) whatever the logits' type; columns past the vocabulary
(padding) have probability zero and gradient zero; the tensor-parallel form equals the plain one. Temperature 0 is
refused: an argmax has no log-probabilities to train on.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[target] and the entropy of that softmax, both [T], in nats.

    `logits` [T, V], `targets` [T] int64; columns >= `vocab_size` are padding. `temperature` is the one that the engine
    sampled with, so that both sides mean the same distribution. The log-probability is differentiable, the entropy only
    with `entropy_gradient` (for an entropy bonus). Raises ValueError for a temperature that is not positive.
    """
    limit = logits.size(-1) if vocab_size is None else vocab_size
    return _apply(logits, targets, temperature, 0, limit, None, entropy_gradient)


def vocab_parallel_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for logits [T, V / ranks] split over the vocabulary; every rank of `group` gets the whole answer [T].

    Rank r holds the columns [r, r + 1) * V / ranks. Three small all-reduces of [T] instead of a gather of [T, V], as in
    Megatron-LM (arXiv 1909.08053, section 3).
    """
    start = dist.get_rank(group) * logits.size(-1)
    return _apply(logits, targets, temperature, start, vocab_size, group, entropy_gradient)


def _apply(*arguments: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropy = _TokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Saves the softmax only.

    d log p_t / d logit_j = ([j = t] - p_j) / temperature;  dH / d logit_j = -p_j (log p_j + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        if not temperature > 0:
            raise ValueError(
                f"temperature is {temperature}; expected more than 0, the one that the engine samples with"
            )
        valid = max(0, min(logits.size(-1), vocab_size - start))
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scaled = logits[:, :valid].to(precision) / temperature
        peak = scaled.amax(-1) if valid else scaled.new_full((len(scaled),), -torch.inf)
        peak = all_reduce(peak, dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        column = targets - start
        here = (column >= 0) & (column < valid)
        column = torch.where(here, column, 0)
        own = scaled.gather(1, column[:, None])[:, 0] if valid else peak.new_zeros(len(scaled))
        picked = all_reduce(torch.where(here, own, 0.0), dist.ReduceOp.SUM, group)
        softmax = scaled.exp()
        normaliser = all_reduce(softmax.sum(-1), dist.ReduceOp.SUM, group)
        softmax /= normaliser[:, None]
        mean_logit = all_reduce((softmax * scaled).sum(-1), dist.ReduceOp.SUM, group)
        log_normaliser = normaliser.log()
        entropy = log_normaliser - mean_logit
        ctx.save_for_backward(softmax, column, here, entropy)
        ctx.temperature, ctx.columns, ctx.dtype = temperature, logits.size(-1), logits.dtype
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return picked - log_normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        softmax, column, here, entropy = ctx.saved_tensors
        picked = entropy.new_zeros(entropy.shape) if grads[0] is None else grads[0] / ctx.temperature
        inner = softmax * -picked[:, None]
        if softmax.size(1):
            inner.scatter_add_(1, column[:, None], torch.where(here, picked, 0.0)[:, None])
        if grads[1] is not None:
            weight = (grads[1] / ctx.temperature)[:, None]
            inner -= weight * (torch.special.xlogy(softmax, softmax) + softmax * entropy[:, None])
        grad = inner.to(ctx.dtype)
        missing = ctx.columns - grad.size(1)
        if missing:
            grad = torch.nn.functional.pad(grad, (0, missing))
        return grad, None, None, None, None, None, None


def all_reduce(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    """`values` reduced in place over `group`; as they are without a group."""
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
