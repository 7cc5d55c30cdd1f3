"""Reward hooks for tests of hook processes. They do what the task's prompt says."""

from __future__ import annotations

import asyncio
import os
import time

from physarum.bus.records import Execution

_arrived = 0
_together = asyncio.Event()


async def meet(execution: Execution, *, parties: int) -> float:
    """Returns once `parties` calls are under way at the same time."""
    global _arrived
    _arrived += 1
    if _arrived == parties:
        _together.set()
    await _together.wait()
    return float(execution.task.prompt)


async def by_prompt(execution: Execution) -> float:
    match execution.task.prompt:
        case "wait":
            await asyncio.sleep(600)
        case "block":
            time.sleep(600)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no such answer")
        case "flood":
            return float(len(bytearray(8 << 30)))
        case "soon":
            await asyncio.sleep(0.05)
    return 1.0


def by_length(executions: list[Execution]) -> list[float]:
    """A group's hook: the longest answer is the best."""
    return [float(len(one.samples[-1].token_ids)) for one in executions]
