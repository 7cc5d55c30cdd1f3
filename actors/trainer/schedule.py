"""Microbatches through Megatron's schedule: forward and backward of one optimizer step with the batch's sums, or forward
only. One stage or a pipeline of several (1F1B, Narayanan et al., arXiv 2104.04473).

Invariant: all microbatches give the same names; sums add up, names that begin with `max_` are maxima. Ranks of one
context-parallel group compute the same sums, so they are added over data-parallel ranks only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exchange import from_stage
from physarum.actors.trainer.megatron.graphs import drop_graphs
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.objective import MAXIMUM

Outcome: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Loss of a microbatch with gradient, and its named sums."""
ForwardStep = Callable[..., tuple[Any, Callable[[Any], Outcome]]]
"""(microbatches, module) -> output of this stage, and a function from the last stage's output to the outcome."""


def run_microbatches(
    model: Model,
    microbatches: list[partial[MicrobatchTensors]],
    forward_step: ForwardStep,
    tokens_per_microbatch: int,
    parallel: Parallel,
) -> dict[str, float]:
    """The sums over all microbatches and ranks, the same everywhere; gradients are in the model's buffers, reduced."""
    names: list[str] = []

    def step(data: Any, ddp: torch.nn.Module) -> Any:
        output, loss_of = forward_step(data, ddp)

        def loss(output: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
            value, sums = loss_of(output)
            names[:] = sorted(sums)
            maxima = [sums[name].double() for name in names if name.startswith(MAXIMUM)]
            totals = [sums[name].double() for name in names if not name.startswith(MAXIMUM)]
            nothing = value.new_zeros(0, dtype=torch.float64)
            outcome = (torch.stack(totals), torch.stack(maxima) if maxima else nothing)
            return value, torch.zeros((), dtype=torch.int, device=value.device), outcome

        return output, loss

    outcomes = _run(model, microbatches, step, tokens_per_microbatch, forward_only=False)
    last = parallel.is_last_stage
    sums = from_stage(_encoded(outcomes, names, parallel) if last else None, parallel.pp - 1, parallel)
    return msgspec.msgpack.decode(sums, type=dict[str, float])


def run_forward(
    model: Model,
    microbatches: list[partial[MicrobatchTensors]],
    compute: Callable[[MicrobatchTensors], Tensor],
    tokens_per_microbatch: int,
) -> list[tuple[Tensor, Tensor]]:
    """What `compute` makes of each microbatch and whose each row is, on the last stage; nothing on stages before it."""

    def step(data: Any, _ddp: torch.nn.Module) -> Any:
        batch = next(data)()

        def collect(output: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
            return output, batch.sequences.ids

        return compute(batch), collect

    return _run(model, microbatches, step, tokens_per_microbatch, forward_only=True)


def _run(
    model: Model,
    microbatches: list[partial[MicrobatchTensors]],
    step: Callable[[Any, torch.nn.Module], Any],
    tokens_per_microbatch: int,
    forward_only: bool,
) -> list[tuple[Tensor, Tensor]]:
    """What the second part of each `step` gave, on the last stage; without backward it is not taken for a loss."""
    try:
        found: list[tuple[Tensor, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[model.ddp],
            num_microbatches=len(microbatches),
            seq_length=tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    finally:
        if not forward_only:
            drop_graphs(model.module)
    return found


def _encoded(outcomes: list[tuple[Tensor, Tensor]], names: list[str], parallel: Parallel) -> bytes:
    """The last stage's sums over its data-parallel ranks, by name."""
    sums = torch.stack([outcome[0] for outcome in outcomes]).sum(0)
    largest = torch.stack([outcome[1] for outcome in outcomes]).amax(0)
    dist.all_reduce(sums, group=parallel.dp_group)
    if len(largest):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.dp_group)
    totals, maxima = iter(sums.tolist()), iter(largest.tolist())
    return msgspec.msgpack.encode({name: next(maxima) if name.startswith(MAXIMUM) else next(totals) for name in names})
