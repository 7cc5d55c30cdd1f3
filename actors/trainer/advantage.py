"""From a batch's rewards and signals to an advantage per token, where the plan's one number per execution is not it.

Invariant: pure, over whole batches on the host, the same on every rank; a token that is not trained has advantage 0.

    planner: group-relative (grpo, rloo), centred (reinforce++-baseline) or the reward itself (returns, distillation)
    here:    returns, GAE, teachers, whitening, the user's hook
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings
from physarum.actors.trainer.algorithms import advantages, losses
from physarum.actors.trainer.algorithms.sequences import Sequences, place_at_end
from physarum.actors.trainer.algorithms.whitening import moments, whiten
from physarum.actors.trainer.batch import TrainSequence
from physarum.configs.hooks import Hook, load_hook

TEACHER = "teacher:"
"""Prefix of the columns with the log-probabilities of teachers."""


@dataclass(frozen=True)
class Batch:
    """All response tokens of a batch in one row of T; `mask` True where the token is trained."""

    sequences: Sequences
    mask: Tensor
    planned: Tensor
    """[T] the plan's advantage, or reward."""
    columns: dict[str, Tensor]
    """[T] float32 each: `engine`, and whatever the sequences carry."""
    executions: Tensor
    """[n] int64: the execution of each sequence."""
    groups: Tensor
    """[n] int64."""
    metadata: list[dict[str, Any]]
    """[n] what `trainer.algorithm.metadata` declares of each sequence's task."""
    starts: Tensor
    """[n] int64: where each sequence's response begins in the row."""

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> Batch:
        lengths = [one.response_len for one in sequences]
        owner = np.repeat(np.arange(len(sequences)), lengths)
        names = sequences[0].columns if sequences else ()
        columns = {name: _joined([one.columns[name] for one in sequences]) for name in names}
        return cls(
            sequences=Sequences(torch.from_numpy(owner), len(sequences)),
            mask=_joined([one.loss_mask for one in sequences]),
            planned=_joined([one.advantages() for one in sequences]),
            columns=columns | {"engine": _joined([one.engine_logprobs for one in sequences])},
            executions=torch.tensor([one.execution for one in sequences]),
            groups=torch.tensor([one.group for one in sequences]),
            metadata=[one.metadata for one in sequences],
            starts=torch.from_numpy(np.cumsum([0, *lengths])[:-1]),
        )

    def rewards(self) -> Tensor:
        """[n] the planned number of each sequence."""
        return self.planned[self.starts]


def with_advantages(settings: AlgorithmSettings, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The sequences with advantages per token (and `return`, for a critic)."""
    batch = Batch.of(sequences)
    values, further = _token_advantages(settings, batch)
    if settings.whitens:
        values = whiten(values, batch.mask, moments(values, batch.mask))
    lengths = [one.response_len for one in sequences]
    pieces = values.float().split(lengths)
    extra = {name: column.float().split(lengths) for name, column in further.items()}
    return [
        _replaced(one, piece, {name: parts[index] for name, parts in extra.items()})
        for index, (one, piece) in enumerate(zip(sequences, pieces, strict=True))
    ]


def _replaced(sequence: TrainSequence, advantage: Tensor, columns: dict[str, Tensor]) -> TrainSequence:
    found = {name: column.numpy() for name, column in columns.items()}
    return msgspec.structs.replace(sequence.with_columns(**found), advantage=advantage.numpy().copy())


def _token_advantages(settings: AlgorithmSettings, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.mask
    match settings.advantage:
        case "gae":
            rewards = place_at_end(batch.rewards(), mask, batch.sequences) - _penalty(settings, batch)
            values, returns = advantages.generalized_advantages(
                rewards, batch.columns["value"], mask, batch.sequences, settings.gamma, settings.lam
            )
            return values, {"return": returns}
        case "reinforce++":
            penalty = _penalty(settings, batch)
            found = advantages.reinforce_plus_plus_returns(
                batch.rewards(), penalty, mask, batch.sequences, settings.gamma
            )
            return found, {}
        case "distillation":
            return _distilled(settings, batch), {}
        case "turns":
            return _of_turns(settings, batch), {}
        case "grpo" | "rloo" | "reinforce++-baseline":
            return torch.where(mask, batch.planned, 0.0), {}
        case hook:
            made: Tensor = load_hook(Hook(hook))(batch, **settings.hook_args)  # type: ignore[operator]
            return torch.where(mask, made, 0.0), {}


def _penalty(settings: AlgorithmSettings, batch: Batch) -> Tensor:
    """coef * KL per token where the penalty stands in the reward, [T]; else 0."""
    if not settings.uses_reference or settings.kl.place == "loss":
        return torch.zeros_like(batch.planned)
    kind = "k1" if settings.kl.kind == "unbiased" else settings.kl.kind
    kl = losses.kl_penalty(batch.columns["proximal"], batch.columns["reference"], batch.mask, kind)
    return settings.kl.coef * kl


def _of_turns(settings: AlgorithmSettings, batch: Batch) -> Tensor:
    """Each turn's discounted return relative to the same turn of the group's other executions, on all its tokens."""
    turn, score = batch.columns["turn"].long(), batch.columns["turn_score"]
    places = torch.stack([batch.sequences.ids, turn], 1)[turn >= 0]
    found, inverse = torch.unique(places, dim=0, return_inverse=True)
    rewards = torch.zeros(len(found)).scatter(0, inverse, score[turn >= 0])
    owners, turns = found[:, 0].tolist(), found[:, 1].tolist()
    returns = advantages.discounted_turn_returns(rewards.tolist(), owners, turns, settings.gamma)
    groups = batch.groups[found[:, 0]].tolist()
    relative = advantages.stepwise_advantages(returns, groups, turns, settings.normalize_std)
    result = torch.zeros_like(score)
    result[turn >= 0] = relative[inverse]
    return torch.where(batch.mask, result, 0.0)


def _distilled(settings: AlgorithmSettings, batch: Batch) -> Tensor:
    """Teachers' advantages by weight, and the reward's beside them."""
    student, signals, weights = batch.columns["proximal"], [], []
    for name, teacher in settings.teachers.items():
        signals.append(advantages.distillation_advantages(batch.columns[TEACHER + name], student, batch.mask))
        weights.append(teacher.weight)
    if settings.reward_weight:
        signals.append(batch.planned)
        weights.append(settings.reward_weight)
    values = torch.stack(signals)
    found, _ = advantages.combine_signals(values, batch.mask & values.isfinite(), torch.tensor(weights))
    return found


def _joined(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
