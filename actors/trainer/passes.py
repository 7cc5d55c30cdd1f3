"""Forward passes over a whole batch: one value per response token, the same on every rank; and the experts that they took.

Invariant: collective; every rank computes its share of the microbatches and gets everybody's values, in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.batch import Experts, Float32, TrainSequence
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.forward import row_logprobs
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors, microbatch_tensors
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.megatron.routing import Routing
from physarum.actors.trainer.packing import plan_microbatches
from physarum.actors.trainer.recorded_routing import RecordedRouting
from physarum.actors.trainer.schedule import run_forward

Compute = Callable[[MicrobatchTensors], Tensor]


class Passes:
    """Of one rank: `budget_tokens` per microbatch, packs padded to a multiple of `align`."""

    def __init__(self, parallel: Parallel, budget_tokens: int, align: int) -> None:
        self._parallel, self._budget_tokens, self._align = parallel, budget_tokens, align

    def logprobs(self, model: Model, sequences: Sequence[TrainSequence], temperature: float) -> list[Float32]:
        """log p of every response token under `model`, one float32 [R] per sequence."""
        model.ddp.eval()
        return self.values(model, sequences, lambda batch: self._row_logprobs(model, batch, temperature))

    def logprobs_and_routing(
        self, model: Model, sequences: Sequence[TrainSequence], temperature: float
    ) -> tuple[list[Float32], list[Experts]]:
        """The same, and the experts of every token but the last, int16 [T - 1, layers, top-k] per sequence."""
        model.ddp.eval()
        assert model.routing is not None
        mine = self._plan(sequences)[self._parallel.dp_rank]
        found = RecordedRouting(model.routing, sequences, mine)
        with model.routing.recorded() as last:

            def compute(batch: MicrobatchTensors) -> Tensor:
                output = self._row_logprobs(model, batch, temperature)
                found.add(batch.origin, last())
                return output

            logprobs = self.values(model, sequences, compute)
        return logprobs, found.whole(self._parallel.device)

    @torch.no_grad()
    def values(self, model: Model, sequences: Sequence[TrainSequence], compute: Compute) -> list[Float32]:
        """What `compute` says of every response token (rows [N] -> [N]), one float32 [R] per sequence.

        On the last stage; before it `compute` gives the hidden states for the next stage.
        """
        ends = np.cumsum([one.response_len for one in sequences])
        everything = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self._parallel.device)
        own = self._plan(sequences)[self._parallel.dp_rank]
        microbatches = [
            partial(self._tensors, [sequences[index] for index in indices], model.routing) for indices in own
        ]
        outputs = run_forward(model, microbatches, compute, self._budget_tokens)
        for indices, (found, ids) in zip(own, outputs, strict=self._parallel.is_last_stage):
            for place, index in enumerate(indices):
                part = found[ids == place].float()
                everything[ends[index] - len(part) : ends[index]] = part
        if self._parallel.is_last_stage:
            dist.all_reduce(everything, group=self._parallel.dp_group)
        if self._parallel.pp > 1:
            last = self._parallel.stage_rank(self._parallel.pp - 1)
            dist.broadcast(everything, last, group=self._parallel.pp_group)
        return np.split(everything.cpu().numpy(), ends[:-1])

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[list[int]]]:
        return plan_microbatches([one.length for one in sequences], self._budget_tokens, self._parallel.dp)

    def _row_logprobs(self, model: Model, batch: MicrobatchTensors, temperature: float) -> Tensor:
        return row_logprobs(model.ddp, model, batch, temperature, self._parallel)[0]

    def _tensors(self, sequences: Sequence[TrainSequence], routing: Routing | None) -> MicrobatchTensors:
        parallel, weights = self._parallel, [0.0] * len(sequences)
        return microbatch_tensors(sequences, weights, (), self._align, parallel.device, True, parallel.shard, routing)
