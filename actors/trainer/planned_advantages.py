"""The one number per execution that a plan records: an advantage, or the reward where advantages are made of returns.

Pure, from headers alone, so that a recorded plan is replayed with the numbers it had.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from physarum.actors.trainer.algorithm_settings import Shaping
from physarum.actors.trainer.algorithms.advantages import group_relative_advantages, rloo_advantages
from physarum.actors.trainer.algorithms.shaping import overlong_penalty, scaled_rewards

OF_RETURNS = ("gae", "reinforce++", "turns")
"""Advantages that the ranks compute from rewards, token by token."""


def planned_advantages(
    objective: str, advantage: str, rewards: Sequence[float], groups: Sequence[str], normalize_std: bool
) -> list[float | None]:
    """One number per execution. Objective "dpo" has `preferences` instead."""
    if objective == "sft" or not rewards:
        return [0.0] * len(rewards)
    if advantage in OF_RETURNS or ":" in advantage:
        return [float(reward) for reward in rewards]
    if advantage == "rloo":
        found: list[float | None] = rloo_advantages(rewards, groups).tolist()
        return found
    normalized = normalize_std and advantage != "reinforce++-baseline"
    relative: list[float | None] = group_relative_advantages(rewards, groups, normalized).tolist()
    return relative


def shaped(shaping: Shaping, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Rewards as advantages are made of them; `lengths`: response tokens of each execution."""
    if shaping == Shaping():
        return list(rewards)
    bound = math.inf if shaping.bound is None else shaping.bound
    found = scaled_rewards(torch.tensor(rewards, dtype=torch.float64), shaping.scale, shaping.shift, bound)
    if shaping.overlong is not None:
        limits = shaping.overlong
        found = found + overlong_penalty(torch.tensor(lengths), limits.max_tokens, limits.buffer_tokens)
    result: list[float] = found.tolist()
    return result


def preferences(
    rewards: Sequence[float], groups: Sequence[str], tokens: Sequence[int | None], budget_tokens: int
) -> list[float | None]:
    """1 and -1 for the pair of each group that is furthest apart, None for the others: they are not trained.

    `tokens`: length of the sequence that an execution would bring into the pair, None where it has no token left to train.
    Both of a pair must be alive and fit one microbatch of `budget_tokens` together. Of equals the chosen one is the first, the
    rejected one the last.
    """
    found: list[float | None] = [None] * len(rewards)
    alive: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if tokens[index] is not None:
            alive.setdefault(group, []).append(index)
    for members in alive.values():
        fitting = [
            (rewards[best] - rewards[worst], -best, worst)
            for best, worst in itertools.permutations(members, 2)
            if rewards[best] > rewards[worst] and (tokens[best] or 0) + (tokens[worst] or 0) <= budget_tokens
        ]
        if fitting:
            _, chosen, rejected = max(fitting)
            found[-chosen], found[rejected] = 1.0, -1.0
    return found
