"""Start-up hook of an engine without CUDA: Python runs it because this folder is on the engine's PYTHONPATH.

Invariant: it changes nothing but the import of torchvision, and that only where torch has no CUDA. PyPI's torchvision
is built against CUDA; beside a CPU torch its operator library cannot be loaded, and its shape registrations then fail
on operators that were never declared. Declaring their schemas (without kernels: calling one raises) lets the import pass.
This module runs inside SGLang's interpreter, where physarum is not installed: it imports nothing of ours.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_MISSING_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclaringLoader(importlib.machinery.SourceFileLoader):
    """Executes torchvision after its missing operators were declared."""

    def exec_module(self, module: ModuleType) -> None:
        import torch

        if torch.version.cuda is None:
            for operator in _MISSING_OPERATORS:
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
        super().exec_module(module)


class _TorchvisionFinder:
    """A meta path finder that answers for the top-level package torchvision alone."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _DeclaringLoader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _TorchvisionFinder())
