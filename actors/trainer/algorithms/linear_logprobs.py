"""Log-probabilities and entropy straight from hidden states and the output layer, without the logits of all tokens.

Invariant: equal to logits = hidden @ weight.T followed by logprobs.py, in value and gradient; at most `chunk_rows` rows of
float32 logits exist at a time, in the forward and in the backward pass, which computes them once more.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.algorithms.logprobs import all_reduce
from physarum.actors.trainer.algorithms.nucleus import KeptRows


def linear_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    *,
    chunk_rows: int,
    entropy_gradient: bool = False,
    reduce_hidden_gradient: bool = True,
    nucleus: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[target] and the entropy of that softmax, [T] each, float32, nats.

    `hidden` [T, H], `weight` [V, H] or [V / ranks, H] with `group` (rank r has the rows [r, r + 1) * V / ranks), `targets`
    [T] int64. `reduce_hidden_gradient`: every rank gets the whole gradient of `hidden`; False leaves each rank its part,
    where the layer before adds them up (sequence parallelism). `nucleus`: the softmax is over these ids (nucleus.py, which has
    the same over whole logits), and so is the entropy. Memory: chunk_rows * V * 4 bytes a few times over instead of
    T * V. Idea: Liger kernel's fused linear cross-entropy (arXiv 2410.10989), here for any loss and sharded vocabularies.
    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected more than 0, the one that the engine samples with")
    start = 0 if group is None else dist.get_rank(group) * weight.size(0)
    valid = max(0, min(weight.size(0), vocab_size - start))
    shape = _Shape(temperature, valid, group, chunk_rows, None if nucleus is None else nucleus.shifted(start))
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets - start, shape, entropy_gradient, reduce_hidden_gradient
    )
    return logprobs, entropy


@dataclass(frozen=True)
class _Shape:
    """What is the same for all rows, and the kept sets by row."""

    temperature: float
    valid: int
    group: dist.ProcessGroup | None
    chunk_rows: int
    kept: KeptRows | None

    def logits(self, hidden: Tensor, weight: Tensor, columns: Tensor, rows: slice) -> Tensor:
        """[rows, valid] of those rows."""
        scaled = _scaled_logits(hidden[rows], weight, self.temperature, self.valid)
        if self.kept is None:
            return scaled
        return self.kept.part(rows.start, rows.stop).cut(scaled, columns[rows])


class _LinearLogprobs(torch.autograd.Function):
    """Saves the normaliser and the entropy of each row only; d log p_t / d logit_j as in logprobs.py."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        shape: _Shape,
        entropy_gradient: bool,
        reduce_hidden_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        found = [
            _forward_chunk(shape.logits(hidden, weight, columns, rows), columns[rows], shape)
            for rows in _chunks(len(hidden), shape.chunk_rows) or [slice(0, 0)]
        ]
        logprobs, normaliser, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, columns, normaliser, entropy)
        ctx.shape, ctx.reduce = shape, reduce_hidden_gradient
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, normaliser, entropy = ctx.saved_tensors
        shape: _Shape = ctx.shape
        valid = shape.valid
        by_logprob = torch.zeros_like(entropy) if grads[0] is None else grads[0] / shape.temperature
        by_entropy = None if grads[1] is None else grads[1] / shape.temperature
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=weight.device)
        for rows in _chunks(len(hidden), shape.chunk_rows):
            scaled = shape.logits(hidden, weight, columns, rows)
            if by_entropy is not None:
                log_softmax = scaled.to(normaliser.dtype).sub_(normaliser[rows, None])
                grad = _with_entropy(log_softmax, entropy[rows], by_logprob[rows], by_entropy[rows])
            elif shape.group is None and valid:
                grad = torch.softmax(scaled, -1, dtype=normaliser.dtype).mul_(-by_logprob[rows, None])
            else:
                grad = scaled.to(normaliser.dtype).sub_(normaliser[rows, None]).exp_().mul_(-by_logprob[rows, None])
            column, here = _own(columns[rows], valid)
            if valid:
                grad.scatter_add_(1, column[:, None], torch.where(here, by_logprob[rows], 0.0)[:, None])
            grad = grad.to(hidden.dtype)
            to_hidden[rows] = grad @ weight[:valid]
            to_weight[:valid] += (grad.T @ hidden[rows]).to(to_weight.dtype)
        if ctx.reduce:
            all_reduce(to_hidden, dist.ReduceOp.SUM, shape.group)
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _with_entropy(log_softmax: Tensor, entropy: Tensor, by_logprob: Tensor, by_entropy: Tensor) -> Tensor:
    """-p (by_logprob + by_entropy (log p + H)), [rows, valid]; p log p is 0 where p is."""
    softmax = log_softmax.exp()
    inner = log_softmax.nan_to_num_(neginf=0.0).add_(entropy[:, None]).mul_(by_entropy[:, None])
    return inner.add_(by_logprob[:, None]).mul_(softmax).neg_()


def _forward_chunk(scaled: Tensor, columns: Tensor, shape: _Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, log of the normaliser, entropy) of each row; `scaled` [rows, valid] is used up."""
    valid, group = shape.valid, shape.group
    if group is None and valid:
        return _forward_whole(scaled, columns)
    scaled = _reduced(scaled)
    peak = scaled.amax(-1) if valid else scaled.new_full((len(scaled),), -torch.inf)
    peak = all_reduce(peak, dist.ReduceOp.MAX, group)
    column, here = _own(columns, valid)
    own = scaled.gather(1, column[:, None])[:, 0] if valid else peak.new_zeros(len(scaled))
    picked = all_reduce(torch.where(here, own, 0.0), dist.ReduceOp.SUM, group)
    shifted = scaled.sub_(peak[:, None])
    weights = shifted.exp()
    total = weights.sum(-1)
    sums = torch.stack([total, weights.mul_(shifted).sum(-1)])
    total, weighted = all_reduce(sums, dist.ReduceOp.SUM, group)
    log_total = total.log()
    return picked - peak - log_total, peak + log_total, log_total - weighted / total


def _forward_whole(scaled: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same where the whole vocabulary is here: torch's fused softmax reads logits of any type and keeps float32.

    The normaliser comes from the likeliest token, whose probability is at least 1 / V and so exact.
    """
    softmax = torch.softmax(scaled, -1, dtype=_precision(scaled))
    peak, place = scaled.max(-1)
    normaliser = peak.to(softmax.dtype) - softmax.gather(1, place[:, None])[:, 0].log()
    own = scaled.gather(1, columns[:, None])[:, 0].to(softmax.dtype)
    entropy = normaliser - softmax.mul_(scaled).sum(-1)
    return own - normaliser, normaliser, entropy


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, valid: int) -> Tensor:
    """[rows, valid]: the layer's own product, in its own type; in float32 where a temperature divides it."""
    logits = hidden @ weight[:valid].T
    return logits if temperature == 1.0 else _reduced(logits).div_(temperature)


def _reduced(logits: Tensor) -> Tensor:
    """In the type that sums are taken in."""
    return logits.to(_precision(logits))


def _precision(logits: Tensor) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _own(columns: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's share (0 where it is another's), and whether it is here."""
    here = (columns >= 0) & (columns < valid)
    return torch.where(here, columns, 0), here
