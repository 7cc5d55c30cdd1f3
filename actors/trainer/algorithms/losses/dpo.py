"""Direct preference optimisation on pairs of whole sequences.

Invariant: a pair that is not valid (one side lost its tokens) contributes exactly zero.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from physarum.actors.trainer.algorithms.masked import counted, masked, summed

PreferenceKind = Literal["sigmoid", "ipo"]


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    valid: Tensor,
    beta: float,
    kind: PreferenceKind = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per pair, [P]; 0 where not `valid`.

    With h = (chosen - reference_chosen) - (rejected - reference_rejected):
    "sigmoid": -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = `label_smoothing`: DPO, arXiv 2305.18290 eq. 7;
    "ipo": (h - 1 / (2 beta))^2: arXiv 2310.12036 eq. 17.
    All [P]: log-probabilities of whole responses (sequences.sequence_sums over their trained tokens). Gradient flows
    through `chosen` and `rejected`. Sums: `pairs`, `pairs_right` (h > 0), `margin` (beta h).
    """
    policy = masked(chosen, valid) - masked(rejected, valid)
    reference = masked(reference_chosen.detach(), valid) - masked(reference_rejected.detach(), valid)
    h = policy - reference
    if kind == "ipo":
        loss = (h - 1.0 / (2.0 * beta)).square()
    else:
        loss = -(1.0 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    with torch.no_grad():
        sums = {"pairs": counted(valid), "pairs_right": counted((h > 0) & valid), "margin": summed(beta * h, valid)}
    return masked(loss, valid), sums
