"""Off-policy correction: the engine sampled with slightly other (or older) probabilities than the trainer computes.

Invariant: weights are detached; sums are over trained tokens only, so they add up over microbatches and ranks.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def truncated_importance_weights(train_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: w = min(exp(log p_train - log p_engine), cap), detached, [T].

    TIS as in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025), after
    Ionides 2008. `cap` > 0; the weight of an on-policy token is 1.
    """
    return (train_logprobs.detach() - engine_logprobs).exp().clamp(max=cap)


def mismatch_sums(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """Sums from which `mismatch_metrics` computes how far engine and trainer are apart.

    With d = log p_train - log p_engine over the trained tokens (`mask` True), [T]: `tokens`, `k1` = sum(-d),
    `k3` = sum(exp(d) - 1 - d), `weight` = sum(exp(d)), `weight_squared` = sum(exp(2 d)),
    `truncated` = tokens with exp(d) > cap, and `max_logprob_diff` = max |d| (a maximum, not a sum). Scalars, float64.
    """
    difference = torch.where(mask, (train_logprobs - engine_logprobs).detach().double(), 0.0)
    ratio = difference.exp()
    inside = mask.double()
    return {
        "tokens": inside.sum(),
        "k1": -difference.sum(),
        "k3": ((ratio - 1.0 - difference) * inside).sum(),
        "weight": (ratio * inside).sum(),
        "weight_squared": (ratio.square() * inside).sum(),
        "truncated": ((ratio > cap) & mask).double().sum(),
        "max_logprob_diff": difference.abs().max() if difference.numel() else difference.new_zeros(()),
    }


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums of a whole batch.

    `kl_k1` and `kl_k3` estimate KL(engine || trainer) in nats per token (Schulman 2020, "Approximating KL
    divergence"; k1 is unbiased, k3 unbiased and never negative). `ess` = (sum w)^2 / (tokens * sum w^2), in (0, 1]: the
    share of tokens that the importance weights leave effective (Kong 1992). `tis_clipped_share`: weights above the cap.
    """
    tokens = sums["tokens"]
    if tokens == 0:
        nothing = dict.fromkeys(("kl_k1", "kl_k3", "ess"), math.nan)
        return nothing | {"tis_clipped_share": 0.0, "max_logprob_diff": 0.0}
    return {
        "kl_k1": sums["k1"] / tokens,
        "kl_k3": sums["k3"] / tokens,
        "ess": sums["weight"] ** 2 / (tokens * sums["weight_squared"]),
        "tis_clipped_share": sums["truncated"] / tokens,
        "max_logprob_diff": sums["max_logprob_diff"],
    }
