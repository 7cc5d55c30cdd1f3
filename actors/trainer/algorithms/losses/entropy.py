"""The entropy bonus.

Invariant: differentiable only with entropies from logprobs.py's `entropy_gradient`; otherwise it is a metric.
"""

from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """-H per token, nats, [T]; 0 where masked. Times a coefficient it rewards entropy: PPO, arXiv 1707.06347 eq. 9."""
    return masked(-entropy, mask)
