"""How far engine and trainer are apart: always measured, also without a correction.

Invariant: sums are over trained tokens only, so they add up over microbatches and ranks; no tokens give NaN and never
"no mismatch".
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


def mismatch_sums(train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """Sums from which `mismatch_metrics` computes how far engine and trainer are apart.

    With d = log p_train - log p_engine over the trained tokens (`mask` True), [T]: `tokens`, `k1` = sum(-d),
    `k3` = sum(exp(d) - 1 - d), `weight` = sum(exp(d)), `weight_squared` = sum(exp(2 d)),
    `truncated` = tokens with exp(d) > cap, and `max_logprob_diff` = max |d| (a maximum, not a sum). Scalars, float64.
    """
    difference = masked((train_logprobs - engine_logprobs).detach().double(), mask)
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


def mismatch_by_age(
    train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, ages: Tensor, max_age: int
) -> Tensor:
    """Tokens, sum of k1 and sum of k3 per age, float64 [max_age + 2, 3]; the last row holds everything older.

    Adds up over microbatches and ranks. Shows whether mismatch comes from age or from the engine (row 0).
    """
    difference = masked((train_logprobs - engine_logprobs).detach().double(), mask)
    columns = torch.stack([mask.double(), -difference, masked(difference.exp() - 1.0 - difference, mask)], 1)
    table = torch.zeros(max_age + 2, 3, dtype=torch.float64, device=ages.device)
    return table.index_add(0, ages.clamp(0, max_age + 1), columns)


def log_slope(values: Sequence[float]) -> float:
    """Least-squares slope of the natural logarithm of `values` over their index, per step.

    Values that are not positive and finite are passed over; NaN where fewer than two are left.
    """
    points = [(step, math.log(value)) for step, value in enumerate(values) if 0.0 < value < math.inf]
    if len(points) < 2:
        return math.nan
    mean_step = sum(step for step, _ in points) / len(points)
    mean_log = sum(log for _, log in points) / len(points)
    spread = sum((step - mean_step) ** 2 for step, _ in points)
    return sum((step - mean_step) * (log - mean_log) for step, log in points) / spread


def is_growing(values: Sequence[float], window: int, doubling_steps: float) -> bool:
    """Whether the last `window` values (k3 per step) grow so fast that they double within `doubling_steps`.

    A mismatch that grows exponentially announces a collapse long before the reward shows it. False before `window`
    values are there.
    """
    if len(values) < window:
        return False
    return log_slope(values[-window:]) > math.log(2.0) / doubling_steps
