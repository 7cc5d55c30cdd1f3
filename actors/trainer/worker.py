"""One rank's part of every command; all ranks run the same methods in the same order.

Invariant: methods marked collective are called on all ranks with equal arguments; a refusal (TrainerError) is decided
from reduced values only, so all ranks refuse together.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from physarum.actors.trainer import rank_state
from physarum.actors.trainer.algorithms.reduction import sequence_weights
from physarum.actors.trainer.batch import Float32, StepResult, TrainSequence
from physarum.actors.trainer.errors import NonFiniteStep
from physarum.actors.trainer.megatron import distributed
from physarum.actors.trainer.megatron.bridge import export_parameter, exported_names
from physarum.actors.trainer.megatron.forward import MicrobatchTensors, microbatch_tensors, row_logprobs
from physarum.actors.trainer.megatron.model import build
from physarum.actors.trainer.megatron.optimizer import Optimizer, OptimizerSettings
from physarum.actors.trainer.objective import SUMS, microbatch_loss, step_metrics
from physarum.actors.trainer.packing import plan_microbatches
from physarum.actors.trainer.world_config import WorldConfig


class Worker:
    """Model, optimizer and place of one rank."""

    def __init__(self, config: WorldConfig, store: dist.Store, rank: int) -> None:
        """Join the process group and build everything; collective."""
        torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.dtype)
        self.config = config
        self.parallel = distributed.initialize(store, rank, config.ranks, config.tp, config.timeout_s, config.seed)
        self.model = build(Path(config.hf_folder), self.parallel, dtype, config.megatron)
        settings = OptimizerSettings(
            config.lr, config.weight_decay, config.betas, config.eps, config.clip_grad, config.warmup_steps
        )
        self.optimizer = Optimizer(self.model, settings, dtype)

    def step(self, sequences: Sequence[TrainSequence], lr: float | None) -> StepResult:
        """One optimizer step over the whole batch; collective. Raises NonFiniteStep, weights untouched."""
        started = time.perf_counter()
        trained = [sequence.trained_tokens for sequence in sequences]
        weights = sequence_weights(trained, [sequence.execution for sequence in sequences], self.config.reduction)
        self.model.ddp.train()
        self.model.ddp.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        sums, largest = self._accumulate(self._microbatches(sequences, weights))
        if not math.isfinite(sums["loss"]):
            raise NonFiniteStep("loss", sums["loss"], len(sequences))
        norm = self.optimizer.gradient_norm()
        if not math.isfinite(norm):
            raise NonFiniteStep("grad_norm", norm, len(sequences))
        rate = self.optimizer.learning_rate(lr)
        self.optimizer.step(rate)
        metrics = step_metrics(self.config, sums, largest) | {"grad_norm": norm, "lr": rate}
        seconds = time.perf_counter() - started
        return StepResult(sums["loss"], norm, sum(trained), len(sequences), metrics, seconds)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32]:
        """Log-probability of every response token, one [R] per sequence, in order; collective."""
        self.model.ddp.eval()
        plan = self._plan(sequences)
        ends = np.cumsum([sequence.response_len for sequence in sequences])
        everything = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self.parallel.device)
        for indices in plan:
            chosen = [sequences[index] for index in indices]
            tensors = microbatch_tensors(chosen, [0.0] * len(chosen), self._align, self.parallel.device, every=True)
            values, _ = row_logprobs(self.model.ddp, self.model, tensors, self.config.temperature, self.parallel)
            for index, part in zip(indices, values.split([s.response_len for s in chosen]), strict=True):
                everything[ends[index] - len(part) : ends[index]] = part
        dist.all_reduce(everything, group=self.parallel.dp_group)
        return np.split(everything.cpu().numpy(), ends[:-1])

    def exported_names(self) -> list[str]:
        """Parameters in export order; an index into it is `export_parameter`'s argument."""
        return exported_names(self.model.module)

    def export_parameter(self, index: int) -> list[tuple[str, Tensor]]:
        """Hugging Face tensors of one parameter; collective over the tensor-parallel ranks of data-parallel rank 0."""
        if self.parallel.dp_rank != 0:
            return []
        return export_parameter(self.model.bridge, self.model.module, self.exported_names()[index], self.parallel)

    def save(self, folder: Path) -> None:
        """Write this rank's share of the training state."""
        rank_state.save_rank(folder, self.model, self.optimizer, self.parallel)

    def load(self, folder: Path) -> None:
        """Restore this rank's share. Raises StateMismatch."""
        rank_state.load_rank(folder, self.model, self.optimizer, self.parallel)

    @property
    def _align(self) -> int:
        return self.parallel.tp if self.model.bridge.config.sequence_parallel else 1

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        lengths = [sequence.length for sequence in sequences]
        return plan_microbatches(lengths, self.config.tokens_per_microbatch, self.parallel.dp)[self.parallel.dp_rank]

    def _microbatches(
        self, sequences: Sequence[TrainSequence], weights: Sequence[float]
    ) -> list[partial[MicrobatchTensors]]:
        """This rank's microbatches, each built when its turn comes: only one lies on the device."""
        return [
            partial(
                microbatch_tensors,
                [sequences[index] for index in indices],
                [weights[index] for index in indices],
                self._align,
                self.parallel.device,
            )
            for indices in self._plan(sequences)
        ]

    def _accumulate(self, microbatches: list[partial[MicrobatchTensors]]) -> tuple[dict[str, float], float]:
        """Forward and backward of all microbatches by Megatron's schedule; the batch's sums over all ranks."""
        outcomes = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(microbatches),
            model=[self.model.ddp],
            num_microbatches=len(microbatches),
            seq_length=self.config.tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=False,
        )
        sums = torch.stack([outcome[0] for outcome in outcomes]).sum(0)
        largest = torch.stack([outcome[1] for outcome in outcomes]).max()
        dist.all_reduce(sums, group=self.parallel.dp_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.parallel.dp_group)
        return dict(zip(SUMS, sums.tolist(), strict=True)), float(largest)

    def _forward_step(self, data: Iterator[partial[MicrobatchTensors]], ddp: torch.nn.Module) -> Any:
        """Megatron's protocol: the model's output, and a function from it to (loss, token count, outcome)."""
        batch = next(data)()
        logprobs, entropy = row_logprobs(ddp, self.model, batch, self.config.temperature, self.parallel)

        def loss(logprobs: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
            value, sums, largest = microbatch_loss(
                self.config, logprobs, entropy, batch.engine_logprobs, batch.advantages, batch.weights
            )
            return value, torch.zeros((), dtype=torch.int, device=value.device), (sums, largest)

        return logprobs, loss
