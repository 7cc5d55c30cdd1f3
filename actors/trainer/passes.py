"""Forward passes over a whole batch: one value per response token, the same on every rank.

Invariant: collective; every rank computes its share of the microbatches and gets everybody's values, in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.batch import Float32, TrainSequence
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.forward import row_logprobs
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors, microbatch_tensors
from physarum.actors.trainer.megatron.model import Model
from physarum.actors.trainer.packing import plan_microbatches
from physarum.actors.trainer.schedule import run_forward

Compute = Callable[[MicrobatchTensors], Tensor]


class Passes:
    """Of one rank: `budget_tokens` per microbatch, packs padded to a multiple of `align`."""

    def __init__(self, parallel: Parallel, budget_tokens: int, align: int) -> None:
        self._parallel, self._budget_tokens, self._align = parallel, budget_tokens, align

    def logprobs(self, model: Model, sequences: Sequence[TrainSequence], temperature: float) -> list[Float32]:
        """log p of every response token under `model`, one float32 [R] per sequence."""
        model.ddp.eval()
        return self.values(
            model, sequences, lambda batch: row_logprobs(model.ddp, model, batch, temperature, self._parallel)[0]
        )

    @torch.no_grad()
    def values(self, model: Model, sequences: Sequence[TrainSequence], compute: Compute) -> list[Float32]:
        """What `compute` says of every response token (rows [N] -> [N]), one float32 [R] per sequence.

        On the last stage; before it `compute` gives the hidden states for the next stage.
        """
        plan = plan_microbatches([one.length for one in sequences], self._budget_tokens, self._parallel.dp)
        ends = np.cumsum([one.response_len for one in sequences])
        everything = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self._parallel.device)
        own = plan[self._parallel.dp_rank]
        microbatches = [partial(self._tensors, [sequences[index] for index in indices]) for indices in own]
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

    def _tensors(self, sequences: Sequence[TrainSequence]) -> MicrobatchTensors:
        parallel, weights = self._parallel, [0.0] * len(sequences)
        return microbatch_tensors(sequences, weights, (), self._align, parallel.device, True, parallel.shard)
