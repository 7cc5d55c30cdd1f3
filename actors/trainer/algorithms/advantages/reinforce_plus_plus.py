"""REINFORCE++: returns per token, normalised over the whole batch instead of the group.

Invariant: both functions give advantages before normalisation; whitening.py does that with the moments of all ranks.
"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from physarum.actors.trainer.algorithms.advantages.group import group_relative_advantages
from physarum.actors.trainer.algorithms.advantages.returns import discounted_returns
from physarum.actors.trainer.algorithms.masked import masked
from physarum.actors.trainer.algorithms.sequences import Sequences, place_at_end, spread


def reinforce_plus_plus_returns(
    rewards: Tensor, penalty: Tensor, mask: Tensor, sequences: Sequences, gamma: float = 1.0
) -> Tensor:
    """G_t of r_t = [t is the last trained token] r - penalty_t, float32 [T]; 0 where masked.

    REINFORCE++, arXiv 2501.03262: then whitened over the batch. `rewards` [sequences]; `penalty` [T] is the KL
    coefficient times k1 against the reference (losses/kl.py), zeros without one. Sequences must be whole.
    """
    placed = place_at_end(rewards, mask, sequences)
    return discounted_returns(placed - masked(penalty.detach(), mask), mask, sequences, gamma)


def reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], mask: Tensor, sequences: Sequences
) -> Tensor:
    """r - mean of the group on every trained token, float32 [T]; 0 where masked.

    REINFORCE++-baseline, arXiv 2501.03262: the group's mean as baseline, then whitened over the batch, where GRPO
    divides by the group's own standard deviation. `rewards` and `groups` [sequences] hold one entry per sequence,
    where every execution is one sequence; otherwise compute per execution first and `spread` the result.
    """
    centred = group_relative_advantages(rewards, groups, normalize_std=False).to(mask.device)
    return spread(centred, mask, sequences)
