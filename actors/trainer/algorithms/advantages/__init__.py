"""From rewards to advantages, one estimator per file.

Invariant: advantages are detached float32; a token that is not trained has advantage 0, whatever its inputs hold.
Per execution where a function takes rewards and groups; per token [T] where it takes a mask.
"""

from physarum.actors.trainer.algorithms.advantages.distillation import (
    distillation_advantages,
    mixed_teachers,
    topk_tail_kl,
)
from physarum.actors.trainer.algorithms.advantages.gae import generalized_advantages
from physarum.actors.trainer.algorithms.advantages.group import group_relative_advantages
from physarum.actors.trainer.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
)
from physarum.actors.trainer.algorithms.advantages.returns import discounted_returns, discounted_turn_returns
from physarum.actors.trainer.algorithms.advantages.rloo import rloo_advantages
from physarum.actors.trainer.algorithms.advantages.signals import combine_signals
from physarum.actors.trainer.algorithms.advantages.stepwise import stepwise_advantages
from physarum.actors.trainer.algorithms.advantages.tournament import tournament_scores

__all__ = [
    "combine_signals",
    "discounted_returns",
    "discounted_turn_returns",
    "distillation_advantages",
    "generalized_advantages",
    "group_relative_advantages",
    "mixed_teachers",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_plus_plus_returns",
    "rloo_advantages",
    "stepwise_advantages",
    "topk_tail_kl",
    "tournament_scores",
]
