"""What the host can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from physarum.bus.server import binary

_GIB: Final = 1 << 30
_PACKAGES: Final = ("nats-py", "msgspec", "numpy", "torch", "megatron-core")


def describe() -> dict[str, Any]:
    """Cores, memory and CUDA device (null: none)."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "cuda_device": _cuda_device(),
    }


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    server = subprocess.run([str(binary()), "--version"], capture_output=True, text=True, check=True).stdout
    return {"python": platform.python_version(), "nats-server": server.split()[-1], **found}


def fsync_per_s(folder: Path, seconds: float = 1.0) -> float:
    """Appends of 4 KiB, each made durable, one after another."""
    path, count, block = folder / "fsync", 0, b"\0" * 4096
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            file.write(block)
            os.fsync(file.fileno())
            count += 1
    path.unlink()
    return count / passed


def memcpy_gib_s(size_bytes: int = 256 << 20, passes: int = 5) -> float:
    """The best of some copies of a block that no cache holds."""
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    best = float("inf")
    for _ in range(passes):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return size_bytes / best / _GIB


def _cuda_device() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
