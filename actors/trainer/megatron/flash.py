"""Causal attention over a whole pack in one kernel on CUDA, by torch's variable-length flash attention.

Invariant: the cost of a step does not depend on whether its lengths were seen before. cuDNN, which torch prefers on new
devices, compiles a plan for each shape of a batch: with lengths that never repeat a step took four times as long.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_LARGEST_HEAD: Final = 256
_HEADS_OF: Final = 8
"""The kernel takes widths that are multiples of it; scaled_dot_product_attention pads others."""
_OLDEST_DEVICE: Final = (8, 0)
_TYPES: Final = (torch.bfloat16, torch.float16)


def without_plans() -> None:
    """For attention that `fits` refuses: scaled_dot_product_attention takes kernels that need no plan per shape."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def fits(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether `attention` can: half precision on CUDA from Ampere on, value heads as wide as query heads, no dropout."""
    width = query.size(-1)
    has_width = width == value.size(-1) <= _LARGEST_HEAD and width % _HEADS_OF == 0
    return query.is_cuda and query.dtype in _TYPES and has_width and dropout == 0.0 and _has_kernel(query.device)


def attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """`query` [T, heads, d], `key` and `value` [T, groups, d]; `bounds` [segments + 1] int32, from 0 to T -> [T, heads, d].

    FlashAttention-2 (arXiv 2307.08691): each token of a segment attends to the segment's tokens up to itself.
    """
    function, accepted = _varlen()
    options: dict[str, Any] = {"scale": scale}
    # Releases of torch differ in how causal is spelled, and in whether grouped heads must be announced.
    options |= {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if query.size(1) != key.size(1) and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    output: Tensor = function(query, key, value, bounds, bounds, longest, longest, **options)
    return output


@cache
def _has_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _OLDEST_DEVICE


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)
