"""Several advantages for the same tokens joined into one.

Invariant: a missing signal is left out, never read as 0; whatever it holds (NaN) does not reach the result.
"""

from typing import Literal

import torch
from torch import Tensor

Missing = Literal["renormalise", "mask"]


def combine_signals(
    values: Tensor, present: Tensor, weights: Tensor, missing: Missing = "renormalise"
) -> tuple[Tensor, Tensor]:
    """Weighted sum of S signals, float32 [T], and where it may be trained, bool [T].

    With the weights w [S], the values v [S, T] and `present` [S, T]: where all are present, sum_s w_s v_s. Where some
    are missing, "renormalise" gives their weight to the others: sum(present w v) * sum(w) / sum(present w), and a token
    without any signal is not trained; "mask" trains only tokens that have all. The result is 0 where it is not trained.
    Rewards by name, each normalised within its group first, are joined the same way (GDPO, arXiv 2601.05242).
    Raises ValueError for a weight that is not positive.
    """
    if not bool((weights > 0).all()):
        raise ValueError(
            f"weights are {weights.tolist()}; expected positive ones (leave a signal out to switch it off)"
        )
    share = weights.double()[:, None] * present
    total = torch.where(present, values.detach().double(), 0.0).mul(share).sum(0)
    covered = share.sum(0)
    trained = present.all(0) if missing == "mask" else present.any(0)
    combined = total * weights.double().sum() / torch.where(trained, covered, 1.0)
    return torch.where(trained, combined, 0.0).float(), trained
