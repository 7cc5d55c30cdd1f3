"""The critic: a Megatron model of its own whose head gives one value per token (advantage `gae`).

Invariant: values are in the units of the reward; the head begins at zero, so an untrained critic says 0 and advantages are
returns. Under tensor parallelism every rank computes the same values from the whole hidden state. Of several stages the
last has the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from physarum.actors.trainer.algorithms.losses import value_loss
from physarum.actors.trainer.algorithms.reduction import weighted_sum
from physarum.actors.trainer.batch import Float32, TrainSequence
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.forward import call_model
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors
from physarum.actors.trainer.megatron.model import Model, build_frozen, wrapped
from physarum.actors.trainer.megatron.optimizer import Optimizer, OptimizerSettings
from physarum.actors.trainer.passes import Passes
from physarum.actors.trainer.schedule import Outcome, run_microbatches
from physarum.actors.trainer.world_config import WorldConfig

COLUMNS = ("value", "return")


class Critic:
    """Model, optimizer and place of one rank's critic. Collective to make and to use."""

    def __init__(
        self, config: WorldConfig, parallel: Parallel, dtype: torch.dtype, settings: OptimizerSettings
    ) -> None:
        chosen = config.algorithm.critic
        folder = Path(config.hf_folder if chosen.model is None else chosen.model)
        bare = build_frozen(folder, parallel, dtype, config.megatron)
        bare.module.share_embeddings_and_output_weights = False  # what it shares has no gradient here
        if parallel.is_last_stage:
            bare.module.output_layer.requires_grad_(False)
            hidden = bare.bridge.config.hidden_size
            bare.module.value_head = torch.nn.Linear(hidden, 1, bias=True, dtype=dtype, device=parallel.device)
            torch.nn.init.zeros_(bare.module.value_head.weight)
            torch.nn.init.zeros_(bare.module.value_head.bias)
        self.model = wrapped(bare, dtype)
        self.optimizer = Optimizer(self.model, settings, dtype)
        self._clip, self._lr = chosen.clip, chosen.lr
        self._parallel = parallel

    def values(self, passes: Passes, sequences: Sequence[TrainSequence]) -> list[Float32]:
        """V of every response token, [R] each: of the state before the token."""
        self.model.ddp.eval()
        compute = partial(row_values, self.model.ddp, self.model, parallel=self._parallel)
        return passes.values(self.model, sequences, compute)

    def update(
        self, microbatches: list[partial[MicrobatchTensors]], lr: float | None, tokens_per_microbatch: int
    ) -> dict[str, float]:
        """One optimizer step on the squared error against the returns; its metrics. A non-finite one changes nothing."""
        self.model.ddp.train()
        self.model.ddp.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        sums = run_microbatches(self.model, microbatches, self._forward_step, tokens_per_microbatch, self._parallel)
        norm = self.optimizer.gradient_norm()
        tokens = max(sums["tokens"], 1.0)
        metrics = {
            "critic_loss": sums["critic_loss"],
            "critic_grad_norm": norm,
            "value_clip_share": sums["value_clipped"] / tokens,
            "explained_variance": _explained(sums, tokens),
        }
        finite = all(torch.isfinite(torch.tensor([norm, sums["critic_loss"]])).tolist())
        if finite:
            self.optimizer.step(self.optimizer.learning_rate(self._lr if lr is None else lr))
        return metrics | {"critic_refused": float(not finite)}

    def _forward_step(self, data: Iterator[partial[MicrobatchTensors]], ddp: torch.nn.Module) -> Any:
        batch = next(data)()
        values = row_values(ddp, self.model, batch, self._parallel)

        def loss(values: Tensor) -> Outcome:
            mask = torch.ones_like(values, dtype=torch.bool)
            columns = batch.columns
            per_token, sums = value_loss(values, columns["value"], columns["return"], mask, self._clip)
            total = weighted_sum(per_token, mask, batch.weights)
            return total, {**sums, "critic_loss": total.detach(), "tokens": mask.sum()}

        return values, loss


def row_values(ddp: torch.nn.Module, model: Model, batch: MicrobatchTensors, parallel: Parallel) -> Tensor:
    """The head's value at every row, [N] float32; before the last stage the hidden states for the next."""

    def rows_of(hidden_states: Tensor, **_unused: Any) -> Tensor:
        hidden = hidden_states.squeeze(1)
        if model.bridge.config.sequence_parallel:
            # Each rank's head sees everything and gets the whole gradient, so the backward pass splits, it does not sum.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values: Tensor = model.module.value_head(hidden.index_select(0, batch.rows)).squeeze(1).float()
        return values

    found: Tensor = call_model(ddp, model, batch, rows_of)
    return batch.shared.whole(found) if batch.shared is not None and parallel.is_last_stage else found


def _explained(sums: dict[str, float], tokens: float) -> float:
    """1 - mean squared error / variance of the returns; 0 where the returns do not vary."""
    variance = sums["return_squared"] / tokens - (sums["return"] / tokens) ** 2
    return 1.0 - sums["squared_error"] / tokens / variance if variance > 1e-12 else 0.0
