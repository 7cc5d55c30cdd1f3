"""REINFORCE with the other members of the group as baseline.

Invariant: a member's baseline does not contain its own reward, so the estimate is unbiased.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.advantages.group import group_relative_advantages


def rloo_advantages(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable]) -> Tensor:
    """A_i = r_i - mean of the other rewards of i's group = n / (n - 1) (r_i - mean of the group), float32 [executions].

    RLOO, arXiv 2402.14740. `rewards` and `groups` hold one entry per execution; a group of one has no baseline and gets
    0. Raises ValueError where the lengths differ or a reward is not finite.
    """
    centred = group_relative_advantages(rewards, groups, normalize_std=False)
    sizes = Counter(groups)
    factors = [sizes[group] / (sizes[group] - 1) if sizes[group] > 1 else 0.0 for group in groups]
    return centred * torch.tensor(factors, dtype=torch.float32, device=centred.device)
