"""Hook processes and the calls that wait for them. Every call ends: by its value, by a named failure, or with the pool.

    score(body) --> waiting --> lane: calls in the pipe of one process, which runs up to `concurrency` of them at once
                                  | overdue, died: the running call fails; the calls behind it go to a new process

The deadline of a call begins when its process turns to it, not when it was sent. With one call at a time, calls are sent
ahead only while the hook is fast; a slow one (a judge) is handed one call at a time, so that no call waits behind it while a
lane is idle. With several at once a call that waits too long is cancelled alone; when the whole process hangs or dies,
those that ran in it run again one by one, so that the one that did it is charged for it and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.reward.errors import HookDiedError, HookTimeoutError, ServiceUnavailableError
from physarum.actors.reward.frames import Answered, Call, Limits, Overdue, Raised, Reply, Returned
from physarum.actors.reward.process import HookProcess, ProcessEndedError

_log = logging.getLogger(__name__)

DEPTH: Final = 16
_FAST_S: Final = 0.01
_WEIGHT: Final = 0.2
_GRACE_S: Final = 2.0
"""A process that runs several calls ends an overdue one itself; one that does not, hangs."""


class _Waiting:
    """A call and who waits for it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.began_at = 0.0
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def succeed(self, value: Any) -> None:
        if not self.result.done():
            self.result.set_result(value)

    def fail(self, error: HookFailedError | BadHookResultError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Pool:
    """`workers` processes of one hook."""

    def __init__(self, hook: str, args: dict[str, Any], workers: int, limits: Limits) -> None:
        self.hook, self.args, self.limits = hook, args, limits
        self._workers = workers
        self.waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._numbers = 0
        self._mean_s: float | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Pool]:
        """Starts the processes (errors as HookProcess.start) and kills them at the end of the block."""
        lanes = [_Lane(self) for _ in range(self._workers)]
        try:
            async with asyncio.TaskGroup() as starts:
                for lane in lanes:
                    starts.create_task(lane.start())
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(lane.run(), name="reward lane") for lane in lanes]
                yield self
                for task in running:
                    task.cancel()
        finally:
            await asyncio.gather(*(lane.close() for lane in lanes))

    @property
    def depth(self) -> int:
        """Calls that one process may hold."""
        if self.limits.concurrency > 1:
            return self.limits.concurrency
        return DEPTH if self._mean_s is not None and self._mean_s < _FAST_S else 1

    @property
    def capacity(self) -> int:
        """Calls that keep every process busy; more would only wait here instead of at another worker."""
        return self._workers * self.depth

    async def score(self, *bodies: bytes) -> Any:
        """The hook's value for one execution, or a group of them (wire forms). Raises HookFailedError or BadHookResultError."""
        self._numbers += 1
        one = _Waiting(Call(self._numbers, list(bodies)))
        self.waiting.put_nowait(one)
        return await one.result

    def measured(self, seconds: float) -> None:
        """The duration of a call that ended by itself."""
        self._mean_s = seconds if self._mean_s is None else (1 - _WEIGHT) * self._mean_s + _WEIGHT * seconds


class _Lane:
    """One process after the other, and the calls that are in its pipe: the first `concurrency` of them are running."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._process: HookProcess | None = None
        self._sent: dict[int, _Waiting] = {}
        self._suspects: deque[_Waiting] = deque()
        self._suspect_runs = False
        self._room = asyncio.Event()
        self._clocks: dict[int, asyncio.TimerHandle] = {}

    async def start(self) -> HookProcess:
        self._process = await HookProcess.start(self._pool.hook, self._pool.args, self._pool.limits)
        return self._process

    async def close(self) -> None:
        self._stop_clocks()
        if self._process is not None:
            await self._process.close()

    async def run(self) -> None:
        """Until cancelled. Raises what a restart of the process raises."""
        process = self._process or await self.start()
        while True:
            await self._serve(process)
            self._stop_clocks()
            self._charge(process, await process.close())
            process = await self.start()

    def _charge(self, process: HookProcess, ending: str) -> None:
        """The running call fails, where it ran alone; several that ran together are tried alone."""
        running = [self._sent.pop(one.call.number) for one in self._running()]
        if len(running) == 1:
            running[0].fail(self._failure(process, ending))
        else:
            self._suspects.extend(running)
        self._suspect_runs = False

    def _failure(self, process: HookProcess, ending: str) -> HookFailedError:
        if process.overdue:
            return self._overdue("its process was killed")
        return HookDiedError(f"the reward hook's process {process.wrote or ending} during the call")

    def _overdue(self, consequence: str) -> HookTimeoutError:
        option = "reward.group.timeout_s" if self._pool.limits.grouped else "reward.timeout_s"
        limit = f"{option} = {self._pool.limits.timeout_s:g} s"
        return HookTimeoutError(f"the reward hook did not return within {limit}; {consequence}")

    async def _serve(self, process: HookProcess) -> None:
        """Returns when the process has ended; what it had not answered is still in `_sent`."""
        for one in self._sent.values():
            process.send(one.call)
        self._start_clocks(process)
        feeder = asyncio.create_task(self._feed(process), name="reward feeder")
        try:
            while True:
                self._take(await process.reply(), process)
        except ProcessEndedError:
            return
        finally:
            feeder.cancel()

    async def _feed(self, process: HookProcess) -> None:
        while True:
            while len(self._sent) >= (1 if self._suspects or self._suspect_runs else self._pool.depth):
                self._room.clear()
                await self._room.wait()
            self._suspect_runs = bool(self._suspects)
            one = self._suspects.popleft() if self._suspects else await self._pool.waiting.get()
            self._sent[one.call.number] = one
            process.send(one.call)
            self._start_clocks(process)

    def _take(self, reply: Reply, process: HookProcess) -> None:
        """The reply of a running call; the next one begins."""
        if not isinstance(reply, Answered):
            raise process.garbled(type(reply).__name__)
        if reply.number not in (running := [one.call.number for one in self._running()]):
            raise process.garbled(f"the reply to call {reply.number}, where one of {running} runs,")
        one = self._sent.pop(reply.number)
        self._clocks.pop(reply.number).cancel()
        self._pool.measured(asyncio.get_running_loop().time() - one.began_at)
        self._end(one, reply)
        self._suspect_runs = False
        self._start_clocks(process)
        self._room.set()

    def _end(self, one: _Waiting, reply: Answered) -> None:
        if isinstance(reply, Returned):
            one.succeed(reply.value)
        elif isinstance(reply, Raised):
            kind = ServiceUnavailableError if reply.unavailable else HookFailedError
            one.fail(kind(f"the reward hook raised {reply.reason}"))
        elif isinstance(reply, Overdue):
            one.fail(self._overdue("it was cancelled"))
        else:
            one.fail(BadHookResultError(reply.reason))

    def _running(self) -> list[_Waiting]:
        return list(itertools.islice(self._sent.values(), self._pool.limits.concurrency))

    def _start_clocks(self, process: HookProcess) -> None:
        """Of the calls that now run."""
        loop, limits = asyncio.get_running_loop(), self._pool.limits
        limit_s = limits.timeout_s + (_GRACE_S if limits.concurrency > 1 else 0.0)
        for one in self._running():
            if one.call.number not in self._clocks:
                one.began_at = loop.time()
                self._clocks[one.call.number] = loop.call_later(limit_s, process.kill_overdue)

    def _stop_clocks(self) -> None:
        for clock in self._clocks.values():
            clock.cancel()
        self._clocks.clear()
