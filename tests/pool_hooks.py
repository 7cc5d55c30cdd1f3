"""Reward hooks for tests of hook processes. They do what the task's prompt says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
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
        case "garble":
            for descriptor in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(descriptor, struct.pack("<I", 3) + b"abc")
        case "raise":
            raise ValueError("no such answer")
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "untold":
            raise _UntoldError
        case "half":
            raise ValueError("half a \ud83d character")
        case "return-twice":
            os.fork()
        case "leave-slowly":
            os.closerange(3, 100)
            time.sleep(0.3)
            os._exit(5)
        case "flood":
            return float(len(bytearray(8 << 30)))
        case "fork-flood":
            _flooding_children(12, 64 << 20)
        case "fork-bomb":
            _bomb(apart=False)
        case "fork-bomb-apart":
            _bomb(apart=True)
        case "soon":
            await asyncio.sleep(0.05)
    return 1.0


class _UntoldError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _flooding_children(count: int, size: int) -> None:
    """Each small enough for itself."""
    for _ in range(count):
        if os.fork() == 0:
            held = bytearray(os.urandom(1 << 20) * (size >> 20))
            time.sleep(600)
            os._exit(len(held) & 1)
    time.sleep(600)


def _bomb(*, apart: bool) -> None:
    """Each process starts another before it sleeps, up to 400; `apart`: in sessions of their own, whose parents have gone."""
    for _ in range(400):
        if apart:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
            os.wait()
        elif os.fork() != 0:
            break
    time.sleep(600)


def by_length(executions: list[Execution]) -> list[float]:
    """A group's hook: the longest answer is the best."""
    return [float(len(one.samples[-1].token_ids)) for one in executions]
