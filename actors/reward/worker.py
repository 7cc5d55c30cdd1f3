"""A hook process: `python -m physarum.actors.reward.worker PARENT_PID HOOK ARGS_JSON`, one call at a time.

The user's code runs here and nowhere else: whatever it does (hang, exit, exhaust memory) ends this process, not the
actor. It cannot reach the pipes: its standard output is the actor's log, its standard input is empty.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from physarum.actors.reward.frames import (
    LENGTH,
    Call,
    Raised,
    Ready,
    Refused,
    Reply,
    Returned,
    Unusable,
    frame,
    read_call,
)
from physarum.actors.reward.reaper import start_reaper
from physarum.actors.reward.values import EXPECTED
from physarum.bus.codec import decode
from physarum.bus.errors import CodecError
from physarum.bus.records import Execution
from physarum.configs.errors import HookError
from physarum.configs.hooks import check_signature, load_hook

_PR_SET_PDEATHSIG: Final = 1
_BUFFER_BYTES: Final = 1 << 20

Hook = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Serves calls until the actor closes the pipe."""
    parent, name, args_json = arguments
    _die_with(int(parent))
    start_reaper()
    calls, replies = _take_pipes()
    try:
        args = orjson.loads(args_json)
        hook: Hook = load_hook(name)  # type: ignore[assignment]  # check_signature: it can be called
        check_signature(hook, ["execution"], name, args)
    except HookError as error:
        _send(replies, Refused(str(error)))
        return 1
    _send(replies, Ready())
    with asyncio.Runner() as runner:
        while (body := _read(calls)) is not None:
            _send(replies, answer(read_call(body), hook, args, runner))
    return 0


def answer(call: Call, hook: Hook, args: dict[str, Any], runner: asyncio.Runner) -> Reply:
    """One call; every outcome short of the process's end is a reply."""
    try:
        value = hook(decode(call.body, Execution), **args)
        if inspect.isawaitable(value):
            value = runner.run(_awaited(value))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; the actor names it and goes on
        return Raised(call.number, describe(error))
    try:
        return Returned(call.number, plain(value))
    except CodecError as error:
        return Unusable(call.number, str(error))


def describe(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, with the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def plain(value: Any) -> Any:
    """numpy scalars as Python's, through mappings and lists. Raises CodecError for what is no number."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    raise CodecError(f"the reward hook returned {value!r:.80} ({type(value).__name__}); {EXPECTED}")


async def _awaited(value: Any) -> Any:
    return await value


def _die_with(parent: int) -> None:
    """The kernel kills this process when the actor ends; the check closes the window before the request."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes under new descriptors that the hook's children do not inherit; 0 reads nothing, 1 is standard error."""
    calls = os.fdopen(os.dup(0), "rb", _BUFFER_BYTES)
    replies = os.fdopen(os.dup(1), "wb", _BUFFER_BYTES)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, replies


def _read(calls: BinaryIO) -> bytes | None:
    head = calls.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = calls.read(size)
    return body if len(body) == size else None


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(frame(reply))
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
