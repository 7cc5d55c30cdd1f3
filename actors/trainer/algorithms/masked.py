"""Masking before arithmetic, and log-ratios that cannot overflow.

Invariant: what a masked position holds (NaN, inf) reaches neither a value nor a gradient, because it is replaced before
anything is computed from it: NaN * 0 is NaN, where(mask, NaN, 0) is 0.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to [-20, 20] nats before exp: e^20 is 5e8, far beyond every clip, and its square fits in float32."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True, else 0 with gradient 0; same shape."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def bounded_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(p / q) from log p (`numerator`) and log q (`denominator`), [T], cut to +-MAX_LOG_RATIO; 0 where masked.

    Gradient flows through the numerator only, and is zero where the cut applies.
    """
    return masked(numerator - denominator.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def summed(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` over `mask`, detached, float64 scalar: a metric that adds up over microbatches and ranks."""
    return masked(values.detach().double(), mask).sum()


def counted(mask: Tensor) -> Tensor:
    """Number of True, float64 scalar."""
    return mask.double().sum()
