"""Hooks of the tools' test runs: few demonstrations, and a generate hook that fails for one row while a file is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from physarum.agents.calculator.demonstrations import Demonstrations
from physarum.agents.demonstration import generate as demonstrate
from physarum.agents.protocols import Client
from physarum.bus.records import Sample, Task


class Few:
    """The first `count` demonstrations."""

    def __init__(self, seed: int, *, count: int) -> None:
        self._rows = Demonstrations(seed, tool_share=1.0, rows=4)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return self._rows.row(epoch, index)


async def generate(task: Task, client: Client, broken: str = "", **args: Any) -> list[Sample]:
    """Row 3 of epoch 0 cannot be done while the file `broken` is there."""
    if task.id.endswith("/0/3/0") and broken and Path(broken).exists():
        raise RuntimeError("the calculator is broken")
    return await demonstrate(task, client, **args)
