"""Advantages of executions from their rewards, relative to the group that shares their prompt.

Invariant: advantages of one group sum to zero, and a group whose rewards are all equal gets exactly zero.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not become huge advantages (as in TRL, verl)."""


def group_relative_advantages(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], normalize_std: bool
) -> Tensor:
    """Group-relative advantage of every execution.

    A_i = r_i - mean(r of i's group), and with `normalize_std` divided by (std of the group + 1e-6): GRPO,
    arXiv 2402.03300, eq. in section 4.1. Without the division it is Dr. GRPO, arXiv 2503.20783.
    The standard deviation is the unbiased one (n - 1), as in the reference implementations.

    `rewards` [n] and `groups` [n] hold one entry per *execution*: an execution that yields several samples appears
    once, else long executions would weigh in the mean more than once. Groups may have unequal sizes; a group of one
    gets 0. Returns float32 [n]. Raises ValueError where the lengths differ or a reward is not finite.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if values.ndim != 1 or len(values) != len(groups):
        raise ValueError(
            f"rewards have shape {tuple(values.shape)}, groups {len(groups)} entries; expected one group per reward"
        )
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"reward {bad} is {float(values[bad])}, expected a finite number; account for that execution")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = torch.zeros_like(values)
    for indices in members.values():
        advantages[indices] = _relative(values[indices], normalize_std)
    return advantages.to(torch.float32)


def _relative(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Advantages within one group, [n] -> [n]; exactly zero where all rewards are equal (no rounding of the mean)."""
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPSILON) if normalize_std else centred
