"""Start-up hook of an engine without CUDA: Python runs it because this folder is on the engine's PYTHONPATH.

Invariant: it changes the import of two modules alone, and only where torch has no CUDA.
* torchvision: PyPI's is built against CUDA; beside a CPU torch its operator library cannot be loaded, and its shape
  registrations then fail on operators that were never declared. Declaring their schemas (without kernels: calling one raises)
  lets the import pass.
* SGLang's host pools: memory on the host is registered with CUDA whatever the device is, also that of recorded experts
  (`--enable-return-routed-experts`). Without CUDA nothing copies from there, so nothing is registered.
This module runs inside SGLang's interpreter, where physarum is not installed: it imports nothing of ours.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_TORCHVISION = "torchvision"
_HOST_POOLS = "sglang.srt.mem_cache.pool_host.common"
_MISSING_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes one of the two modules, and does what it needs before or after."""

    def exec_module(self, module: ModuleType) -> None:
        import torch

        bare = torch.version.cuda is None
        if bare and self.name == _TORCHVISION:
            for operator in _MISSING_OPERATORS:
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
        super().exec_module(module)
        if bare and self.name == _HOST_POOLS:
            module._cuda_host_register = _register_nothing  # type: ignore[attr-defined]


def _register_nothing(*_arguments: object, **_named: object) -> None:
    """In the place of cudaHostRegister."""


class _Finder:
    """A meta path finder that answers for the two modules alone."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in (_TORCHVISION, _HOST_POOLS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
