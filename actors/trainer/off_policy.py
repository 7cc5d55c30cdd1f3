"""The configured off-policy corrections, applied to whole sequences.

Invariant: pure; on-policy tokens keep weight 1 whatever is configured (but a weight by age). Sums are named by kind, so that
several corrections can stand side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from physarum.actors.trainer import algorithm_settings as settings
from physarum.actors.trainer.advantage import Batch
from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, AnyCorrection, Bound, Rule
from physarum.actors.trainer.algorithms import corrections
from physarum.actors.trainer.algorithms.corrections import Correction
from physarum.actors.trainer.algorithms.sequences import Sequences, log_ratio_sums
from physarum.actors.trainer.batch import TrainSequence


@dataclass(frozen=True)
class OffPolicy:
    """What corrections look at, [T] each: the trainer's log-probabilities (detached), the engine's, advantages, ages."""

    train: Tensor
    engine: Tensor
    advantages: Tensor
    ages: Tensor
    """int64."""
    mask: Tensor
    sequences: Sequences


def corrected(chosen: tuple[AnyCorrection, ...], tokens: OffPolicy) -> Correction:
    """All of `chosen` at once. Those with a statistic over the batch (`weighs_whole_batch`) must be given all of it."""
    found = [_one(correction, tokens) for correction in chosen]
    return corrections.combined(*found) if found else corrections.identity(tokens.mask)


def old_logprobs(
    algorithm: AlgorithmSettings, columns: Mapping[str, Tensor], current: Tensor, ages: Tensor, mask: Tensor
) -> Tensor:
    """log p of the policy that the ratio is taken against, detached. `current`: of the policy before the update, [T]."""
    match algorithm.old_logprobs:
        case "engine" | "kept":
            return columns[algorithm.old_logprobs]
        case "interpolate":
            return corrections.interpolated_proximal(current, columns["engine"], ages, mask)
        case _:
            return current


def weighed_logprobs(algorithm: AlgorithmSettings, old: Tensor, current: Tensor) -> Tensor:
    """log p of the policy whose weight against the engine a correction bounds: the old one, or where the ratio itself is
    taken against the engine the policy before the update."""
    return current if algorithm.old_logprobs == "engine" else old


def with_weights(
    algorithm: AlgorithmSettings, sequences: Sequence[TrainSequence]
) -> tuple[list[TrainSequence], dict[str, float]]:
    """The whole batch's corrections as a column `correction` of the sequences, 0 where a token is rejected; and their sums."""
    batch = Batch.of(sequences)
    ages, current = batch.columns["age"].long(), batch.columns["proximal"]
    old = old_logprobs(algorithm, batch.columns, current, ages, batch.mask)
    train = weighed_logprobs(algorithm, old, current)
    tokens = OffPolicy(train, batch.columns["engine"], batch.planned, ages, batch.mask, batch.sequences)
    found = corrected(algorithm.correction, tokens)
    pieces = found.weights.float().split([one.response_len for one in sequences])
    weighed = [one.with_columns(correction=piece.numpy().copy()) for one, piece in zip(sequences, pieces, strict=True)]
    return weighed, {name: float(value) for name, value in found.sums.items()}


def _one(chosen: AnyCorrection, tokens: OffPolicy) -> Correction:
    train, engine, mask = tokens.train, tokens.engine, tokens.mask
    match chosen:
        case settings.Tis():
            weights = corrections.importance_weights(train, engine, mask)
            return corrections.bounded_weights(weights, mask, "truncate", _bound(chosen.cap, tokens), name="tis")
        case settings.Mis():
            return _mis(chosen, tokens)
        case settings.IcePop():
            return corrections.icepop(train, engine, mask, _bound(chosen.low, tokens), _bound(chosen.high, tokens))
        case settings.Opsm():
            sums = log_ratio_sums(train, engine, mask, tokens.sequences)
            delta = _bound(chosen.delta, tokens, whole=True)
            return corrections.off_policy_sequence_mask(sums, tokens.advantages, mask, tokens.sequences, delta)
        case settings.M2po():
            cutoff = corrections.exact_cutoff(corrections.second_moments(train, engine, mask)[mask], chosen.threshold)
            return corrections.second_moment_mask(train, engine, mask, cutoff)
        case settings.Dppo():
            low, high = _bound(chosen.low, tokens), _bound(chosen.high, tokens)
            return corrections.divergence_mask(train, engine, tokens.advantages, mask, low, high, chosen.divergence)
        case settings.AgeWeight():
            return corrections.age_weights(tokens.ages, mask, chosen.weight.rule())


def _mis(chosen: settings.Mis, tokens: OffPolicy) -> Correction:
    train, engine, mask, sequences = tokens.train, tokens.engine, tokens.mask, tokens.sequences
    whole = chosen.level != "token"
    if chosen.level == "token":
        weights = corrections.importance_weights(train, engine, mask)
    else:
        sums = log_ratio_sums(train, engine, mask, sequences)
        weights = corrections.sequence_importance_weights(sums, mask, sequences, chosen.level)
    low, high = _bound(chosen.low, tokens, whole), _bound(chosen.high, tokens, whole)
    found = corrections.bounded_weights(weights, mask, chosen.mode, high, low, name="mis")
    if chosen.veto is not None:
        counts = corrections.veto_counts(train, engine, mask, sequences, chosen.veto)
        found = corrections.combined(found, corrections.veto(mask, sequences, counts))
    if chosen.normalize:
        found = corrections.normalized_weights(found, corrections.weight_totals(found, sequences if whole else None))
    return found


def _bound(bound: Bound, tokens: OffPolicy, whole: bool = False) -> float | Tensor:
    """A number, or one per token by its age; `whole`: by the age of its sequence's oldest token."""
    if not isinstance(bound, Rule):
        return float(bound)
    ages = corrections.oldest_ages(tokens.ages, tokens.mask, tokens.sequences) if whole else tokens.ages
    return corrections.by_age(bound.rule(), ages).to(torch.float32)
