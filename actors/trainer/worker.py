"""One rank's part of every command; all ranks run the same methods in the same order.

Invariant: methods marked collective are called on all ranks with equal arguments; a refusal (TrainerError) is decided
from reduced values only, so all ranks refuse together.
"""

import datetime
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer import rank_state, sharded_checkpoint
from physarum.actors.trainer.advantage import with_advantages
from physarum.actors.trainer.algorithm_settings import REDUCTIONS
from physarum.actors.trainer.algorithms.reduction import sequence_weights
from physarum.actors.trainer.batch import Float32, StepResult, TrainSequence
from physarum.actors.trainer.critic import COLUMNS, Critic
from physarum.actors.trainer.draft_layers import DraftLayers
from physarum.actors.trainer.errors import EmptyBatch, NonFiniteStep
from physarum.actors.trainer.holdings import CRITIC, POLICY, REFERENCE, Holdings, Learner
from physarum.actors.trainer.megatron import distributed
from physarum.actors.trainer.megatron.exporting import export_parameter, exported_parameters
from physarum.actors.trainer.megatron.forward import row_logprobs
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors, microbatch_tensors
from physarum.actors.trainer.megatron.model import Model, build
from physarum.actors.trainer.megatron.optimizer import Optimizer, OptimizerSettings
from physarum.actors.trainer.megatron.torch_dist import is_torch_dist
from physarum.actors.trainer.minibatches import minibatches, pairs, plan_units
from physarum.actors.trainer.objective import MAXIMUM, Rows, microbatch_loss, step_metrics
from physarum.actors.trainer.off_policy import with_weights
from physarum.actors.trainer.passes import Passes
from physarum.actors.trainer.rank_snapshot import RankSnapshot
from physarum.actors.trainer.replay import replay_metrics
from physarum.actors.trainer.schedule import Outcome, run_microbatches
from physarum.actors.trainer.signals import Signals, needed_columns
from physarum.actors.trainer.state_writing import StateWriting
from physarum.actors.trainer.world_config import WorldConfig

_WRITING = datetime.timedelta(hours=1)
"""How long the ranks that write a training state may wait for each other."""
_COUNTS = ("tokens", "pairs", "minibatches_refused", "critic_refused")


class Worker:
    """Model, optimizer and place of one rank."""

    def __init__(self, config: WorldConfig, store: dist.TCPStore, rank: int) -> None:
        """Join the process group and build everything; collective."""
        torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.dtype)
        self.config, self._settings = config, config.algorithm
        shape = distributed.Shape.of(config)
        self.parallel = distributed.initialize(store, rank, shape, config.timeout_s, config.seed)
        self._replay = config.replay
        self.model = build(
            Path(config.hf_folder), self.parallel, dtype, config.megatron, replays=self._replay.routing != "off"
        )
        self.exported = exported_parameters(self.model, self.parallel)
        """Parameters in export order; an index into it is `export_parameter`'s argument."""
        self.drafts = DraftLayers(Path(config.hf_folder), self.model.bridge.hf_config)
        self.snapshot = RankSnapshot(self.model, self.exported, self.parallel, self.drafts)
        settings = OptimizerSettings(
            config.lr, config.weight_decay, config.betas, config.eps, config.clip_grad, config.warmup_steps
        )
        self.optimizer = Optimizer(self.model, settings, dtype)
        self._passes = Passes(self.parallel, config.tokens_per_microbatch, self._align)
        self._signals = Signals(config, self.parallel, dtype, self._passes, self.model)
        learns_values = config.objective == "rl" and self._settings.uses_critic
        self._critic = Critic(config, self.parallel, dtype, self._critic_settings(settings)) if learns_values else None
        self._columns = needed_columns(config.objective, self._settings)
        self.writing = StateWriting(rank, config.ranks, store)
        self._saving_group = (
            dist.new_group(backend="gloo", timeout=_WRITING) if config.checkpoint_format == "torch_dist" else None
        )

    def step(self, sequences: Sequence[TrainSequence], lr: float | None, number: int) -> StepResult:
        """The optimizer steps of one batch, which leaves version `number`; collective.

        Raises NonFiniteStep or EmptyBatch, weights untouched.
        """
        started = time.perf_counter()
        self._signals.before_batch(number - 1)
        if number - 1 in self.config.optimizer_resets:
            self.optimizer.reset()
        batch, weighed = self._prepared(sequences)
        parts = minibatches(batch, self._settings.minibatches)
        policy = [self._update(part, lr, first=place == 0) for place, part in enumerate(parts) if self._learns_policy]
        found = _averaged(policy) | weighed | replay_metrics(batch, self._replay) | self._learn_values(parts, lr)
        if policy:
            self._signals.after_batch(number)
        return StepResult(
            loss=found.get("loss", 0.0),
            grad_norm=found.get("grad_norm", 0.0),
            tokens_trained=int(found.get("tokens", 0)),
            sequences=len(batch),
            metrics=found,
            seconds=time.perf_counter() - started,
            changed=bool(policy),
        )

    @property
    def _learns_policy(self) -> bool:
        """Not while the critic alone warms up."""
        return self._critic is None or self._critic.optimizer.steps >= self._settings.critic.warmup_steps

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32]:
        """Log-probability of every response token, one [R] per sequence, in order; collective."""
        return self._passes.logprobs(self.model, sequences, self.config.temperature)

    def _prepared(self, sequences: Sequence[TrainSequence]) -> tuple[list[TrainSequence], dict[str, float]]:
        """The batch with every signal, its advantages, and the weights of corrections that look at all of it (their means
        per trained token beside it)."""
        if self.config.objective == "sft":
            return list(sequences), {}
        chosen = pairs(sequences) if self.config.objective == "dpo" else list(sequences)
        if not chosen:
            raise EmptyBatch(
                f"{len(sequences)} sequences hold no pair of a better and a worse one; expected at least one"
            )
        batch = self._signals.complete(chosen, self._critic)
        if self.config.objective == "dpo":
            return batch, {}
        batch = with_advantages(self._settings, batch)
        if not self._settings.weighs_whole_batch:
            return batch, {}
        batch, sums = with_weights(self._settings, batch)
        tokens = sum(one.trained_tokens for one in batch)
        return batch, {name: value / max(tokens, 1) for name, value in sums.items()}

    def _update(self, sequences: list[TrainSequence], lr: float | None, first: bool) -> dict[str, float]:
        """One optimizer step. A non-finite one raises NonFiniteStep if it is the batch's first, else it is passed over."""
        self.model.ddp.train()
        self.model.ddp.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        microbatches = self._microbatches(sequences, self._columns, self.model)
        sums = run_microbatches(
            self.model, microbatches, self._forward_step, self.config.tokens_per_microbatch, self.parallel
        )
        norm = self.optimizer.gradient_norm() if math.isfinite(sums["loss"]) else math.nan
        refused = [
            (name, value) for name, value in (("loss", sums["loss"]), ("grad_norm", norm)) if not math.isfinite(value)
        ]
        if refused and first:
            raise NonFiniteStep(*refused[0], len(sequences))
        metrics = step_metrics(self.config.objective, sums)
        if refused:
            return {"minibatches_refused": 1.0}
        rate = self.optimizer.learning_rate(lr)
        self.optimizer.step(rate)
        return metrics | {"grad_norm": norm, "lr": rate}

    def _learn_values(self, parts: list[list[TrainSequence]], lr: float | None) -> dict[str, float]:
        if self._critic is None:
            return {}
        steps = [
            self._critic.update(
                self._microbatches(part, COLUMNS, self._critic.model), lr, self.config.tokens_per_microbatch
            )
            for part in parts
        ]
        return _averaged(steps)

    def _critic_settings(self, policy: OptimizerSettings) -> OptimizerSettings:
        chosen = self._settings.critic
        return replace(policy, lr=policy.lr if chosen.lr is None else chosen.lr)

    def export_parameter(self, index: int, on_device: bool = False) -> list[tuple[str, Tensor]]:
        """Rank 0: the Hugging Face tensors of one parameter; collective over the ranks that hold it and rank 0."""
        return export_parameter(self.model, self.exported[index], self.parallel, on_device)

    def begin_save(self, folder: Path) -> None:
        """Take this rank's share of the training state and go on writing it, in the form that is configured; collective."""
        if self._saving_group is not None:
            sharded = sharded_checkpoint.taken(self._holdings(), self.parallel)
            self.writing.begin(partial(sharded_checkpoint.save, folder, sharded, self._saving_group))
        else:
            share = rank_state.taken(self._holdings(), self.parallel)
            self.writing.begin(partial(rank_state.save, folder, share))

    def load(self, folder: Path) -> None:
        """Restore this rank's share, whichever form it was saved in. Raises StateMismatch."""
        form = sharded_checkpoint if is_torch_dist(folder) else rank_state
        form.load(folder, self._holdings(), self.parallel)

    def save_weights(self, folder: Path) -> None:
        """Write this rank's part of the policy's weights in torch_dist; collective."""
        sharded_checkpoint.save_weights(folder, self.model)

    def load_weights(self, folder: Path) -> set[str]:
        """This rank's part of the policy's weights; which tensors they are parts of. Raises StateMismatch."""
        return sharded_checkpoint.load_weights(folder, self.model)

    def load_optimizer(self, folder: Path, steps: int | None) -> int:
        """This rank's part of the policy's optimizer; the steps that it had made. Raises StateMismatch."""
        return sharded_checkpoint.load_optimizer(folder, self._holdings(), steps)

    def _holdings(self) -> Holdings:
        learners = {POLICY: Learner(self.model, self.optimizer)}
        if self._critic is not None:
            learners[CRITIC] = Learner(self._critic.model, self._critic.optimizer)
        reference = self._signals.reference if self._settings.reference.update_every is not None else None
        return Holdings(learners, {} if reference is None else {REFERENCE: reference})

    @property
    def _align(self) -> int:
        return self.parallel.tp if self.model.bridge.config.sequence_parallel else 1

    def _microbatches(
        self, sequences: Sequence[TrainSequence], columns: Sequence[str], model: Model
    ) -> list[partial[MicrobatchTensors]]:
        """This rank's microbatches for `model`, each built when its turn comes: only one lies on the device."""
        unit = 2 if self.config.objective == "dpo" else 1
        weights = self._weights(sequences)
        lengths = [sequence.length for sequence in sequences]
        plan = plan_units(lengths, unit, self.config.tokens_per_microbatch, self.parallel.dp)[self.parallel.dp_rank]
        return [
            partial(
                microbatch_tensors,
                [sequences[index] for index in indices],
                [weights[index] for index in indices],
                columns,
                self._align,
                self.parallel.device,
                shard=self.parallel.shard,
                routing=model.routing,
            )
            for indices in plan
        ]

    def _weights(self, sequences: Sequence[TrainSequence]) -> list[float]:
        if self.config.objective == "dpo":
            return [2.0 / len(sequences)] * len(sequences)
        trained = [sequence.trained_tokens for sequence in sequences]
        executions = [sequence.execution for sequence in sequences]
        reduction = REDUCTIONS[self._settings.reduction]
        return sequence_weights(trained, executions, reduction, self._settings.constant_tokens)

    def _forward_step(self, data: Iterator[partial[MicrobatchTensors]], ddp: torch.nn.Module) -> Any:
        """This stage's output, and a function from the last stage's (log-probabilities) to (loss, sums)."""
        batch = next(data)()
        logprobs, entropy = row_logprobs(
            ddp, self.model, batch, self.config.temperature, self.parallel, self._settings.entropy_coef > 0
        )

        def loss(logprobs: Tensor) -> Outcome:
            rows = Rows(logprobs, entropy, batch.weights, batch.columns, batch.sequences, batch.metadata)
            return microbatch_loss(self.config.objective, self._settings, rows)

        return logprobs, loss


def _averaged(steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps: means, but counts add up and of maxima the largest counts."""
    found: dict[str, list[float]] = {}
    for one in steps:
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {name: _joined(name, values) for name, values in found.items()}


def _joined(name: str, values: list[float]) -> float:
    if name.startswith(MAXIMUM):
        return max(values)
    return sum(values) / (1 if name in _COUNTS else len(values))
