"""Bounds and weights as a function of each token's age.

Invariant: the age is the token's own (versions between the one that made it and the step that trains it), not its
sample's or its batch's: one sample that lived through three versions gets three bounds.

Any correction becomes age-aware by a bound per token: bounded_weights(..., high=by_age(rule, ages)).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction
from physarum.actors.trainer.algorithms.masked import counted, masked, summed
from physarum.actors.trainer.algorithms.sequences import Sequences


@dataclass(frozen=True)
class AgeTable:
    """One value per age 0, 1, 2, ...; the last one holds for everything older. Raises ValueError when empty."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("the table of values by age is empty; expected at least the value of age 0")


@dataclass(frozen=True)
class AgeDecay:
    """offset + base * decay^age. A cap that closes in on 1: offset 1, base cap - 1, decay below 1.

    Raises ValueError for a decay outside (0, 1].
    """

    base: float
    decay: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay is {self.decay}; expected more than 0 and at most 1 (per version of age)")


AgeRule = AgeTable | AgeDecay


def by_age(rule: AgeRule, ages: Tensor) -> Tensor:
    """The rule's value for every token, float32 [T], from `ages` [T] int64 >= 0."""
    if isinstance(rule, AgeTable):
        table = torch.tensor(rule.values, dtype=torch.float32, device=ages.device)
        return table[ages.clamp(0, len(rule.values) - 1)]
    power = torch.pow(torch.tensor(rule.decay, dtype=torch.float64, device=ages.device), ages.clamp(min=0))
    return (rule.offset + rule.base * power).float()


def age_weights(ages: Tensor, mask: Tensor, rule: AgeRule) -> Correction:
    """Weight by age alone, [T]: old tokens count less, whatever their ratio. A weight of 0 rejects the token.

    Sums: `age_weight` (sum of weights), `age_rejected` (tokens).
    """
    weights = masked(by_age(rule, ages), mask)
    kept = mask & (weights != 0)
    return Correction(weights, kept, {"age_weight": summed(weights, kept), "age_rejected": counted(mask & ~kept)})


def oldest_ages(ages: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """Age of the oldest trained token of the sequence, on every token, [T]: for bounds on ratios per sequence.

    Over parts of a sequence (context parallelism) it is the maximum. Sequences without trained tokens get 0.
    """
    trained = torch.where(mask, ages, 0)
    zeros = torch.zeros(sequences.count, dtype=ages.dtype, device=ages.device)
    return zeros.scatter_reduce(0, sequences.ids, trained, "amax")[sequences.ids]
