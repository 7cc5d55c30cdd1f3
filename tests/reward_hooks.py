"""Reward hooks for tests, each with one habit. They run in hook processes, which import this file by its path."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from physarum.bus.records import Execution


def by_prompt(execution: Execution, *, folder: str = "") -> Any:
    """Does what the task's prompt says."""
    prompt = execution.task.prompt
    if prompt == "raise":
        raise ValueError("no such answer")
    if prompt == "exit":
        os._exit(3)
    if prompt == "sys-exit":
        sys.exit("leaving")
    if prompt == "hang":
        child = subprocess.Popen(["sleep", "600"])
        Path(folder, "child").write_text(str(child.pid))
        time.sleep(600)
    if prompt == "print":
        print("noise on standard output", flush=True)  # noqa: T201 - that is this hook's habit
        os.write(1, b"more noise\n")
        return sys.stdin.read() == "" and 2.0
    return VALUES[prompt]


VALUES: dict[str, Any] = {
    "one": 1.0,
    "true": True,
    "umlaut": {"größe": 0.5},
    "parts": {"format": 0.25, "answer": 0.5},
    "numpy": np.float32(0.5),
    "list": [1.0, {"a": 2.0}],
    "nan": float("nan"),
    "text": "good",
    "none": None,
    "object": object(),
    "empty": {},
    "short": [1.0],
    "huge": 1 << 80,
    "long": 0.1234567890123456,
    "many-parts": {f"größe {number:04}": 0.5 for number in range(1000)},
}


def once_told(execution: Execution, *, folder: str) -> float:
    """Takes one byte out of a FIFO for each call."""
    with open(Path(folder, "told"), "rb", buffering=0) as told:
        return float(len(told.read(1)))


async def slowly(execution: Execution) -> float:
    """Async: the loop stays the same from call to call."""
    global _loop
    loop = asyncio.get_running_loop()
    assert _loop is None or _loop is loop
    _loop = loop
    await asyncio.sleep(0)
    return 0.25


_loop: asyncio.AbstractEventLoop | None = None


def pid(execution: Execution) -> float:
    return float(os.getpid())


def judge_turn(execution: Execution, *, folder: str) -> float:
    """Turn 0 is judged by what followed it, turn 1 tells that; each waits for the other (a FIFO has two ends)."""
    continuation = Path(folder, "continuation")
    if execution.task.prompt.endswith("turn 0"):
        return float(len(continuation.read_text()))
    continuation.write_text("yes")
    return 0.5
