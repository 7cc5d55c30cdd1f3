"""Which groups are worth training: predicates on a group's rewards, and the choice among more groups than needed.

Invariant: pure functions of rewards in their order of arrival; every group offered is in exactly one part of a choice.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Rewards = Sequence[float]
Predicate = Callable[[Rewards], bool]


def is_informative(rewards: Rewards, min_spread: float = 0.0) -> bool:
    """Whether max - min > `min_spread`: a group of equal rewards has advantage 0 everywhere.

    Dynamic sampling of DAPO, arXiv 2503.14476 eq. 11 (0 < correct answers < group size), for rewards of any kind.
    """
    return max(rewards) - min(rewards) > min_spread


def is_within_pass_rate(rewards: Rewards, low: float, high: float) -> bool:
    """Whether `low` < mean reward < `high`: neither hopeless nor solved (online difficulty filter)."""
    return low < sum(rewards) / len(rewards) < high


def rejected_in_a_row(verdicts: Sequence[bool]) -> int:
    """How many groups were rejected since the last accepted one; a caller stops or falls back at its limit."""
    return next((index for index, accepted in enumerate(reversed(verdicts)) if accepted), len(verdicts))


class Choice(NamedTuple):
    """Indices of groups, in their order of arrival."""

    chosen: list[int]
    rejected: list[int]
    """Refused by the predicate and not needed."""
    surplus: list[int]
    """Accepted, but more than wanted."""
    kept_though_rejected: list[int]
    """Part of `chosen` that the predicate refused: too few were accepted."""


def choose_groups(
    groups: Sequence[Rewards], wanted: int, accept: Predicate, keep_when_insufficient: bool = False
) -> Choice:
    """The first `wanted` groups that `accept` lets pass, of an over-sampled batch.

    With `keep_when_insufficient` the rest is filled from the rejected, in order of arrival; otherwise `chosen` is short
    and the caller asks for more groups.
    """
    accepted = [index for index, rewards in enumerate(groups) if accept(rewards)]
    refused = sorted(set(range(len(groups))) - set(accepted))
    missing = wanted - len(accepted)
    kept = refused[:missing] if keep_when_insufficient and missing > 0 else []
    return Choice(
        chosen=sorted(accepted[:wanted] + kept),
        rejected=[index for index in refused if index not in kept],
        surplus=accepted[wanted:],
        kept_though_rejected=kept,
    )
