"""The proximal policy of decoupled PPO, without a forward pass of its own.

Invariant: three policies, three roles: the engine's (behaviour) is corrected for by a detached weight
proximal / behaviour, and the trained one is clipped against the proximal one.

    loss = policy_loss(current, proximal, ...) * weight(proximal, engine)

AReaL, arXiv 2505.24298 eq. 5, after Hilton et al., arXiv 2110.00641. The weight is any correction with the proximal
log-probabilities in the place of the trainer's (AReaL rejects tokens with a weight above its cap: mode "mask").
The proximal policy is recomputed (the trainer's own before the first update of the step), or interpolated here.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


def interpolated_proximal(
    current_logprobs: Tensor, engine_logprobs: Tensor, ages: Tensor, mask: Tensor, proximal_age: int = 1
) -> Tensor:
    """log p_prox = (1 - a) log p_engine + a log p_current, a = max(0, 1 - proximal_age / age), detached, [T]; 0 masked.

    The log-linear approximation of AReaL (A-3PO, arXiv 2512.06547: weight 1 / age on the behaviour policy): on a
    straight line in log space from the version that made the token (`ages` [T] int64: versions between it and the
    current one) to the current one, the proximal policy lies `proximal_age` versions behind the current. A token not
    older than the proximal policy takes the engine's value (its weight is 1).
    """
    age = ages.clamp(min=1).to(current_logprobs.dtype)
    share = (1.0 - proximal_age / age).clamp(min=0.0)
    engine = masked(engine_logprobs.detach(), mask)
    current = masked(current_logprobs.detach(), mask)
    return torch.where(ages > proximal_age, engine + share * (current - engine), engine)
