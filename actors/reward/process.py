"""One hook process as the actor sees it: started, spoken to over its pipes, killed with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any, Final

import msgspec
import orjson

from physarum.actors.errors import UnrecoverableError
from physarum.actors.reward.errors import HookProcessError
from physarum.actors.reward.frames import LENGTH, Call, Limits, Ready, Refused, Reply, frame, read_reply

_START_S: Final = 300.0
"""Importing a hook may load a model; a process that is silent for longer does not start any more."""


_LEAVE_S: Final = 2.0
"""Between the end of a process's pipe and its own: an interpreter that leaves writes its traceback and its buffers."""


class ProcessEndedError(Exception):
    """The process closed its pipe: it ended, or was killed."""


class HookProcess:
    """A running `worker.py`. `overdue` is set by `kill_overdue`, so that the reader knows why the pipe closed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # both were asked for
        self._process = process
        self._calls, self._replies = process.stdin, process.stdout
        self.overdue = False
        self._killed = False
        self.wrote: str | None = None
        """What `garbled` was told of."""
        self._ending: str | None = None

    @classmethod
    async def start(cls, hook: str, args: dict[str, Any], limits: Limits) -> HookProcess:
        """Returns once the hook is imported. Raises UnrecoverableError (refused hook) or HookProcessError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "physarum.actors.reward.worker",
            str(os.getpid()),
            hook,
            orjson.dumps(args).decode(),
            msgspec.json.encode(limits).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        made = cls(process)
        try:
            async with asyncio.timeout(_START_S):
                made._check_started(await made.reply(), hook)
        except ProcessEndedError:
            reason = f"its process {await made.close()} while the hook was imported; the log's lines above say why"
            raise HookProcessError(f"reward hook {hook} did not start: {reason}") from None
        except TimeoutError:
            await made.close()
            raise HookProcessError(f"reward hook {hook} was not imported within {_START_S:g} s") from None
        except BaseException:
            await made.close()
            raise
        return made

    def send(self, call: Call) -> None:
        """Queues a call; writes of one turn of the event loop leave together."""
        self._calls.write(frame(call))

    async def reply(self) -> Reply:
        """The next reply. Raises ProcessEndedError at the end of the pipe."""
        try:
            (size,) = LENGTH.unpack(await self._replies.readexactly(LENGTH.size))
            return read_reply(await self._replies.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ProcessEndedError from error
        except msgspec.DecodeError as error:
            raise self.garbled(f"what is no reply ({error})") from error

    def garbled(self, found: str) -> ProcessEndedError:
        """Something else than the worker wrote to the pipe of replies: whose is whose is not known any more."""
        self.wrote = (
            f"wrote {found} to the pipe of its replies, and was killed: a hook may not write to descriptors of others"
        )
        self.kill()
        return ProcessEndedError(self.wrote)

    def kill(self) -> None:
        """The hook's process and whatever it started (reaper.py) are killed."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)

    def kill_overdue(self) -> None:
        """A running call has run out of time."""
        self.overdue = True
        self.kill()

    async def close(self) -> str:
        """Kills what is left, reaps it, and says how it ended. Once: later the process id may be somebody else's."""
        if self._ending is None:
            if self._replies.at_eof() and not self._killed:
                await self._left()
            ended = self._process.returncode
            self.kill()
            status = await self._process.wait()
            self._ending = _ending(status if ended is None else ended)
        return self._ending

    async def _left(self) -> None:
        """One that closed its pipe is ending: killed now, it would seem to have been killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._process.wait()

    def _check_started(self, reply: Reply, hook: str) -> None:
        if isinstance(reply, Refused):
            raise UnrecoverableError(reply.reason)
        if not isinstance(reply, Ready):
            raise HookProcessError(f"reward hook {hook} began with {type(reply).__name__}; expected Ready")


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "was killed by SIGKILL (for reward.total_mib or reward.children, or for want of memory: the log says which)"
        )
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
