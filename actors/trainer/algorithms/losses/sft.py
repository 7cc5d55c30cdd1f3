"""Supervised cross entropy per token.

Invariant: masked tokens contribute exactly zero to value and gradient.
"""

from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked


def sft_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy per token, -log p(token | prefix), [T]; 0 where `mask` is False."""
    return masked(-logprobs, mask)
