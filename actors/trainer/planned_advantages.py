"""The one number per execution that a plan records: an advantage, or the reward where advantages are made of returns.

Pure, from headers alone, so that a recorded plan is replayed with the numbers it had.
"""

from __future__ import annotations

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
    """One number per execution; None: it is not trained (objective "dpo" trains the best and the worst of a group)."""
    if objective == "sft" or not rewards:
        return [0.0] * len(rewards)
    if objective == "dpo":
        return preferences(rewards, groups)
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


def preferences(rewards: Sequence[float], groups: Sequence[str]) -> list[float | None]:
    """1 for the first of the best and -1 for the last of the worst of each group whose rewards differ, else None."""
    found: list[float | None] = [None] * len(rewards)
    for group in dict.fromkeys(groups):
        members = [index for index, name in enumerate(groups) if name == group]
        best, worst = (
            max(members, key=lambda index: rewards[index]),
            min(reversed(members), key=lambda index: rewards[index]),
        )
        if rewards[best] > rewards[worst]:
            found[best], found[worst] = 1.0, -1.0
    return found
