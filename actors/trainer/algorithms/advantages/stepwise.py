"""Advantages within a group and within the same step of the episode.

Invariant: a step is compared only with the same step of its siblings; a step that only one sibling reached gets 0.
"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from physarum.actors.trainer.algorithms.advantages.group import group_relative_advantages


def stepwise_advantages(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], steps: Sequence[int], normalize_std: bool
) -> Tensor:
    """Group-relative advantages of samples that are steps of multi-step executions, float32 [samples].

    A_i = (r_i - mean over (group, step)) / (std over (group, step) + 1e-6), the division with `normalize_std` only.
    `rewards` [samples] holds a return or score per step, `steps` [samples] its index in the execution. Step-level
    groups as in GiGPO (arXiv 2505.10978, with the step index as anchor). Raises ValueError as
    `group_relative_advantages` does, and where `steps` and `groups` differ in length.
    """
    return group_relative_advantages(rewards, list(zip(groups, steps, strict=True)), normalize_std)
