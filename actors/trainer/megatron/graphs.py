"""Graphs that Megatron's modules keep after a step.

A token dispatcher of experts remembers the last microbatch's routing probabilities with their graph. From a graph lead hooks
that hold the whole model, and through autograd's C++ no garbage collector sees the circle: neither model nor process groups
of such a world would ever go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def drop_graphs(module: torch.nn.Module) -> None:
    """Detaches what the token dispatchers in `module` keep; call between steps, when no backward is to come."""
    for kept in _dispatchers(module):
        for name, value in vars(kept).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(kept, name, value.detach())


def _dispatchers(module: torch.nn.Module) -> Iterator[Any]:
    """With what the flexible one keeps apart (DeepEP, HybridEP)."""
    for part in module.modules():
        dispatcher = getattr(part, "token_dispatcher", None)
        if dispatcher is not None:
            yield dispatcher
            if (manager := getattr(dispatcher, "_comm_manager", None)) is not None:
                yield manager
