"""Models that are only asked: the reference, teachers, and kept old weights of the policy.

Invariant: their weights lie on the host and are on the device only during a pass; nothing here ever has a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.model import Model, build_frozen, weights

Weights = dict[str, Tensor]


class FrozenModel:
    """A model of its own, from a Hugging Face folder. Collective to make."""

    def __init__(
        self,
        folder: Path,
        parallel: Parallel,
        dtype: torch.dtype,
        overrides: Mapping[str, Any],
        replays: bool = False,
    ) -> None:
        """`replays`: its routers take the experts that a sequence has on record."""
        self._device = parallel.device
        self._model = build_frozen(folder, parallel, dtype, overrides, replays)
        self._model.module.requires_grad_(False)
        self._model.module.to("cpu")

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Model]:
        self._model.module.to(self._device)
        try:
            yield self._model
        finally:
            self._model.module.to("cpu")

    @property
    def module(self) -> torch.nn.Module:
        """On the host except during a pass."""
        module: torch.nn.Module = self._model.module
        return module

    def weights(self) -> Weights:
        """This rank's share; the live tensors."""
        return weights(self._model.module)

    @torch.no_grad()
    def load(self, given: Weights) -> None:
        """Takes a copy of `given`, those of a model of the same shape."""
        for name, tensor in self.weights().items():
            tensor.copy_(given[name])


class KeptWeights:
    """The policy's weights after each of the last batches, on the host, by their number.

    What was made before a restart is gone: `get` then gives None, and the caller says what it takes instead.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, Weights] = {}

    def keep(self, number: int, module: torch.nn.Module) -> None:
        """A copy of what `module` holds now; the oldest beyond `count` goes."""
        self._kept[number] = {name: one.detach().to("cpu", copy=True) for name, one in weights(module).items()}
        while len(self._kept) > self._count:
            del self._kept[min(self._kept)]

    @property
    def newest(self) -> int:
        return max(self._kept)

    def get(self, number: int) -> Weights | None:
        return self._kept.get(number)
