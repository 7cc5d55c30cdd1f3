"""A hook process: `python -m physarum.actors.reward.worker PARENT_PID HOOK ARGS_JSON LIMITS_JSON`.

The user's code runs here and nowhere else: whatever it does (hang, exit, exhaust memory) ends this process, not the
actor. It cannot reach the pipes: its standard output is the actor's log, its standard input is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import orjson

from physarum.actors.reward.frames import (
    LENGTH,
    Call,
    Limits,
    Overdue,
    Raised,
    Ready,
    Refused,
    Reply,
    Returned,
    Unusable,
    frame,
    read_call,
)
from physarum.actors.reward.reaper import start_under_keeper
from physarum.actors.reward.values import EXPECTED
from physarum.agents.rewards.errors import BackendUnavailableError
from physarum.bus.codec import decode
from physarum.bus.errors import CodecError
from physarum.bus.records import Execution
from physarum.configs.errors import HookError
from physarum.configs.hooks import check_signature, load_hook

_BUFFER_BYTES: Final = 1 << 20

Hook = Callable[..., Any]


def main(arguments: list[str]) -> int:
    """Serves calls until the actor closes the pipe."""
    parent, name, args_json, limits_json = arguments
    limits = msgspec.json.decode(limits_json, type=Limits)
    start_under_keeper(int(parent), limits)
    calls, replies = _take_pipes()
    _limit_memory(limits)
    try:
        args = orjson.loads(args_json)
        hook: Hook = load_hook(name)  # type: ignore[assignment]  # check_signature: it can be called
        check_signature(hook, ["execution"], name, args)
    except HookError as error:
        replies.send(Refused(str(error)))
        return 1
    replies.send(Ready())
    with asyncio.Runner() as runner:
        if limits.concurrency > 1:
            runner.run(serve_together(calls, replies, hook, args, limits))
            return 0
        while (body := _read(calls)) is not None:
            replies.send(answer(read_call(body), hook, args, limits, runner))
    return 0


async def serve_together(calls: BinaryIO, replies: Replies, hook: Hook, args: dict[str, Any], limits: Limits) -> None:
    """Calls run as tasks of one loop, until the pipe is closed. The actor never sends more than `concurrency` of them."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
    async with asyncio.TaskGroup() as group:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                call = read_call(await reader.readexactly(size))
                group.create_task(_answer_one(call, replies, hook, args, limits))


async def _answer_one(call: Call, replies: Replies, hook: Hook, args: dict[str, Any], limits: Limits) -> None:
    replies.send(await answer_in_time(call, hook, args, limits))


async def answer_in_time(call: Call, hook: Hook, args: dict[str, Any], limits: Limits) -> Reply:
    """As `answer`, beside other calls; one that waits for longer than its deadline is cancelled."""
    deadline = asyncio.timeout(limits.timeout_s)
    try:
        async with deadline:
            value = hook(_subject(call, limits), **args)
            if inspect.isawaitable(value):
                value = await value
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the actor names it and goes on
        return Overdue(call.number) if deadline.expired() else raised(call.number, error)
    return _returned(call.number, value)


def answer(call: Call, hook: Hook, args: dict[str, Any], limits: Limits, runner: asyncio.Runner) -> Reply:
    """One call; every outcome short of the process's end is a reply."""
    try:
        value = hook(_subject(call, limits), **args)
        if inspect.isawaitable(value):
            value = runner.run(_awaited(value))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the actor names it and goes on
        return raised(call.number, error)
    return _returned(call.number, value)


def _subject(call: Call, limits: Limits) -> Execution | list[Execution]:
    """What the hook is called with."""
    executions = [decode(body, Execution) for body in call.bodies]
    return executions if limits.grouped else executions[0]


def _returned(number: int, value: Any) -> Reply:
    try:
        return Returned(number, plain(value))
    except CodecError as error:
        return Unusable(number, str(error))


def raised(number: int, error: BaseException) -> Raised:
    """The reply for a call that raised; of a group of errors, the first one counts."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return Raised(number, describe(error), isinstance(error, BackendUnavailableError))


def describe(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, with the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_text(error)}{place}"


def _text(error: BaseException) -> str:
    """On one line, and with a wire form; the user's own class may fail to make one."""
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001 - as the hook itself
        return f"(its text could not be made: {type(failed).__name__})"
    return sendable(" ".join(text.split()))


def sendable(text: str) -> str:
    """Half a character (a lone surrogate) has no form in UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def plain(value: Any) -> Any:
    """numpy scalars as Python's, through mappings and lists. Raises CodecError for what is no number."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {sendable(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, str):
        return sendable(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    raise CodecError(f"the reward hook returned {value!r:.80} ({type(value).__name__}); {EXPECTED}")


async def _awaited(value: Any) -> Any:
    return await value


def _limit_memory(limits: Limits) -> None:
    """A hook that asks for more gets MemoryError, instead of the machine running out."""
    if limits.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))


class Replies:
    """The pipe to the actor, of this process alone: a fork of the hook's that comes back out of the call ends here."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe, self._owner = pipe, os.getpid()

    def send(self, reply: Reply) -> None:
        if os.getpid() != self._owner:
            os._exit(0)
        self._pipe.write(frame(reply))
        self._pipe.flush()


def _take_pipes() -> tuple[BinaryIO, Replies]:
    """The pipes under new descriptors that the hook's children do not inherit; 0 reads nothing, 1 is standard error."""
    calls = os.fdopen(os.dup(0), "rb", _BUFFER_BYTES)
    replies = Replies(os.fdopen(os.dup(1), "wb", _BUFFER_BYTES))
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
