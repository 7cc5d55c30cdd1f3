"""Which groups are worth training: predicates on a group's rewards, in their order of arrival.

What is made of the verdicts (refill, fall-back, the end of a run that only rejects) is filtering.py's.
"""

from collections.abc import Sequence

Rewards = Sequence[float]


def is_informative(rewards: Rewards, min_spread: float = 0.0) -> bool:
    """Whether max - min > `min_spread`: a group of equal rewards has advantage 0 everywhere.

    Dynamic sampling of DAPO, arXiv 2503.14476 eq. 11 (0 < correct answers < group size), for rewards of any kind.
    """
    return max(rewards) - min(rewards) > min_spread


def is_within_pass_rate(rewards: Rewards, low: float, high: float) -> bool:
    """Whether `low` < mean reward < `high`: neither hopeless nor solved (online difficulty filter)."""
    return low < sum(rewards) / len(rewards) < high
