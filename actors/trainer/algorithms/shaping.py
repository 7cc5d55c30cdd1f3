"""Rewards before they become advantages: a soft penalty of length, scale and bounds.

Invariant: element by element; nothing here mixes executions.
"""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Soft punishment of long responses, [n] in [-1, 0], to be added to the reward. DAPO, arXiv 2503.14476 eq. 13.

    With L = `max_tokens`, C = `buffer_tokens` and `lengths` [n] in tokens:
    0 up to L - C;  (L - C - length) / C up to L;  -1 beyond. Raises ValueError unless 0 < C <= L.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens}, max_tokens {max_tokens}; expected 0 < buffer_tokens <= max_tokens"
        )
    free = max_tokens - buffer_tokens
    return ((free - lengths.to(torch.float32)) / buffer_tokens).clamp(-1.0, 0.0)


def scaled_rewards(rewards: Tensor, scale: float = 1.0, shift: float = 0.0, bound: float = float("inf")) -> Tensor:
    """clip((r + shift) * scale, -bound, bound), [n]."""
    return ((rewards + shift) * scale).clamp(-bound, bound)
