"""The loss of one microbatch and the sums behind the step's metrics, from log-probabilities.

Invariant: everything here adds up over microbatches and ranks (sums; names that begin with `max_` are maxima); the division
by counts happens once, for the whole batch, in `step_metrics`. Every microbatch of a configuration has the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings
from physarum.actors.trainer.algorithms import losses
from physarum.actors.trainer.algorithms.corrections import mismatch_metrics, mismatch_sums
from physarum.actors.trainer.algorithms.corrections.correction import Correction
from physarum.actors.trainer.algorithms.reduction import weighted_sum
from physarum.actors.trainer.algorithms.sequences import Sequences, sequence_sums
from physarum.actors.trainer.off_policy import OffPolicy, corrected, old_logprobs, weighed_logprobs
from physarum.configs.hooks import Hook, load_hook

Objective = Literal["rl", "sft", "dpo"]
MAXIMUM = "max_"
_TRUNCATION = 2.0
"""Importance weights above it are counted in `tis_clipped_share`, with or without a correction."""


@dataclass(frozen=True)
class Rows:
    """N trained tokens of whole sequences; columns [N] float32, those of `signals.needed_columns`.

    `proximal` is absent where it is the trained policy itself: one optimizer step, its own log-probabilities before it.
    `correction`: weights that were computed over the whole batch beforehand; `kept`: by the kept weights of old versions.
    """

    logprobs: Tensor
    entropy: Tensor
    weights: Tensor
    """1 / denominator, see algorithms/reduction.py."""
    columns: Mapping[str, Tensor]
    sequences: Sequences
    metadata: list[dict[str, Any]] = field(default_factory=list)
    """Of each sequence: what a loss hook was promised."""

    def column(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.logprobs, dtype=torch.bool)

    @property
    def current(self) -> Tensor:
        """log p of the policy before the update, detached."""
        return self.columns.get("proximal", self.logprobs.detach())

    @property
    def ages(self) -> Tensor:
        """Of each token, int64."""
        return self.columns["age"].long()


def microbatch_loss(objective: Objective, algorithm: AlgorithmSettings, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (scalar, with gradient) and named sums (scalars)."""
    if objective == "sft":
        loss, sums = weighted_sum(losses.sft_loss(rows.logprobs, rows.mask), rows.mask, rows.weights), {}
    elif objective == "dpo":
        loss, sums = _preference(algorithm, rows)
    else:
        loss, sums = _policy(algorithm, rows)
    sums |= {"tokens": rows.mask.sum(), "entropy": rows.entropy.sum(), "loss": loss.detach()}
    return loss, {name: value.detach().double() for name, value in sums.items()}


def step_metrics(objective: Objective, sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a whole batch from its sums: what has no name of its own is a mean per trained token."""
    tokens, pairs = max(sums["tokens"], 1.0), max(sums.get("pairs", 1.0), 1.0)
    metrics = {name: sums[name] for name in _AS_THEY_ARE if name in sums}
    if objective == "rl":
        metrics |= mismatch_metrics(sums)
    metrics |= {name: sums[name] / pairs for name in _PER_PAIR if name in sums}
    rest = sums.keys() - _AS_THEY_ARE - _PER_PAIR - _OF_MISMATCH
    return metrics | {_METRICS.get(name, name): sums[name] / tokens for name in sorted(rest)}


_AS_THEY_ARE = {"loss", "tokens", "pairs"}
_PER_PAIR = {"pairs_right", "margin"}
_OF_MISMATCH = {"k1", "k3", "weight", "weight_squared", "truncated", "max_logprob_diff"}
"""What `mismatch_metrics` makes its means of."""
_METRICS = {"clipped": "clip_share", "dual_clipped": "dual_clip_share", "ratio": "ratio_mean"}


def _policy(algorithm: AlgorithmSettings, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate of the ratio to the old policy, weighed by the corrections, and the penalties."""
    old = old_logprobs(algorithm, rows.columns, rows.current, rows.ages, rows.mask)
    correction = _correction(algorithm, rows, old)
    per_token, sums = _surrogate(algorithm, rows, old)
    loss = weighted_sum(correction.applied(per_token), rows.mask, rows.weights)
    if algorithm.uses_reference and algorithm.kl.place == "loss":
        penalty = _kl(algorithm, rows)
        loss = loss + algorithm.kl.coef * weighted_sum(penalty, rows.mask, rows.weights)
        sums |= {"kl": penalty.detach().sum()}
    if algorithm.entropy_coef:
        entropy = losses.entropy_loss(rows.entropy, rows.mask)
        loss = loss + algorithm.entropy_coef * weighted_sum(entropy, rows.mask, rows.weights)
    sums |= mismatch_sums(rows.logprobs, rows.column("engine"), rows.mask, _TRUNCATION) | correction.sums
    return loss, sums


def _correction(algorithm: AlgorithmSettings, rows: Rows, old: Tensor) -> Correction:
    """Computed over the whole batch beforehand, or here."""
    if "correction" in rows.columns:
        kept = rows.column("correction") != 0
        return Correction(rows.column("correction"), kept, {"rejected": (~kept).sum()})
    train, advantages = weighed_logprobs(algorithm, old, rows.current), rows.column("advantage")
    tokens = OffPolicy(train, rows.column("engine"), advantages, rows.ages, rows.mask, rows.sequences)
    found = corrected(algorithm.correction, tokens)
    return Correction(found.weights, found.mask, {**found.sums, "rejected": (~found.mask).sum()})


def _surrogate(algorithm: AlgorithmSettings, rows: Rows, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, advantages, mask = rows.logprobs, rows.column("advantage"), rows.mask
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo":
            return losses.policy_loss(logprobs, old, advantages, mask, low, high, algorithm.dual_clip)
        case "cispo":
            return losses.cispo_loss(logprobs, old, advantages, mask, low, high)
        case "gspo":
            return losses.gspo_loss(logprobs, old, advantages, mask, rows.sequences, low, high)
        case "gspo-token":
            return losses.gspo_token_loss(logprobs, old, advantages, mask, rows.sequences, low, high)
        case "sapo":
            return losses.sapo_loss(logprobs, old, advantages, mask)
        case hook:
            columns: dict[str, Any] = {
                **rows.columns,
                "old": old,
                "entropy": rows.entropy,
                "mask": mask,
                "sequence": rows.sequences.ids,
            }
            columns["metadata"] = rows.metadata
            loss: Tensor = load_hook(Hook(hook))(logprobs, columns, **algorithm.hook_args)
            return loss, {}


def _kl(algorithm: AlgorithmSettings, rows: Rows) -> Tensor:
    """Per token; the unbiased kind carries its own importance ratio, against who sampled the token."""
    reference = rows.column("reference")
    if algorithm.kl.kind == "unbiased":
        return losses.unbiased_kl_penalty(rows.logprobs, rows.column("engine"), reference, rows.mask)
    return losses.kl_penalty(rows.logprobs, reference, rows.mask, algorithm.kl.kind)


def _preference(algorithm: AlgorithmSettings, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO over the pairs of the microbatch: sequences 2i (chosen) and 2i + 1 (rejected) stand side by side."""
    policy = sequence_sums(rows.logprobs, rows.mask, rows.sequences)
    reference = sequence_sums(rows.column("reference"), rows.mask, rows.sequences).total
    chosen, rejected = policy.total[0::2], policy.total[1::2]
    valid = (policy.tokens[0::2] > 0) & (policy.tokens[1::2] > 0)
    loss, sums = losses.preference_loss(chosen, rejected, reference[0::2], reference[1::2], valid, algorithm.dpo_beta)
    share = rows.weights[:1].sum()  # 1 / pairs of the batch on every token; 0 in an empty microbatch
    return (loss * share).sum().to(rows.logprobs.dtype), sums
