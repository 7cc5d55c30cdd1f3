"""In place of the package's own, which knows CUDA and NPU only: nothing to wait for, and memory is mapped without a device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any


def npu_generate_uuid() -> str:
    raise RuntimeError("there is no NPU")


class DeviceManager:
    """Made by the receiver before it maps the sender's memory."""

    device_type = "cpu"
    device_module = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)

    def __init__(self) -> None:
        worker: Any = sys.modules["checkpoint_engine.worker"]
        worker._rebuild_ipc = _mapped


def _mapped(handle: tuple[Any, tuple[Any, ...]], device_id: Any = None) -> Any:
    function, arguments = handle
    return function(*arguments)
