"""IcePop: tokens on which trainer and engine disagree too much are left out, on both sides.

Invariant: a token inside the bounds keeps its weight unchanged; one outside has no gradient at all.
"""

from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction
from physarum.actors.trainer.algorithms.corrections.importance import Bound, bounded_weights, importance_weights


def icepop(
    train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, low: Bound = 0.5, high: Bound = 5.0
) -> Correction:
    """M(k) = k if low <= k <= high else 0, with k = p_train / p_engine, per token [T], detached.

    IcePop of Ring-1T, arXiv 2510.18855 section 2.3.2; bounds 0.5 and 5 are the authors'. It is "mask" at the token level
    under its own name. Sums: `icepop_low`, `icepop_high`, `icepop_weight`.
    """
    weights = importance_weights(train_logprobs, engine_logprobs, mask)
    return bounded_weights(weights, mask, "mask", high, low, name="icepop")
