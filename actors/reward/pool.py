"""Hook processes and the calls that wait for them. Every call ends: by its value, by a named failure, or with the pool.

    score(body) --> waiting --> lane: up to DEPTH calls in the pipe of one process, which runs one at a time
                                  | overdue, died: the running call fails; the calls behind it go to a new process

The deadline of a call begins when its process turns to it, not when it was sent. Calls are sent ahead only while the
hook is fast; a slow one (a judge) is handed one call at a time, so that no call waits behind it while a lane is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.reward.errors import HookDiedError, HookProcessError, HookTimeoutError
from physarum.actors.reward.frames import Call, Raised, Reply, Returned, Unusable
from physarum.actors.reward.process import HookProcess, ProcessEndedError

_log = logging.getLogger(__name__)

DEPTH: Final = 16
_FAST_S: Final = 0.01
_WEIGHT: Final = 0.2


class _Waiting:
    """A call and who waits for it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def succeed(self, value: Any) -> None:
        if not self.result.done():
            self.result.set_result(value)

    def fail(self, error: HookFailedError | BadHookResultError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Pool:
    """`workers` processes of one hook."""

    def __init__(self, hook: str, args: dict[str, Any], workers: int, timeout_s: float) -> None:
        self.hook, self.args, self.timeout_s = hook, args, timeout_s
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
        return DEPTH if self._mean_s is not None and self._mean_s < _FAST_S else 1

    @property
    def capacity(self) -> int:
        """Calls that keep every process busy; more would only wait here instead of at another worker."""
        return self._workers * self.depth

    async def score(self, body: bytes) -> Any:
        """The hook's value for one execution (its wire form). Raises HookFailedError or BadHookResultError."""
        self._numbers += 1
        one = _Waiting(Call(self._numbers, body))
        self.waiting.put_nowait(one)
        return await one.result

    def measured(self, seconds: float) -> None:
        """The duration of a call that ended by itself."""
        self._mean_s = seconds if self._mean_s is None else (1 - _WEIGHT) * self._mean_s + _WEIGHT * seconds


class _Lane:
    """One process after the other, and the calls that are in its pipe: the first of them is running."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._process: HookProcess | None = None
        self._sent: deque[_Waiting] = deque()
        self._room = asyncio.Event()
        self._began_at = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    async def start(self) -> HookProcess:
        self._process = await HookProcess.start(self._pool.hook, self._pool.args)
        return self._process

    async def close(self) -> None:
        self._stop_clock()
        if self._process is not None:
            await self._process.close()

    async def run(self) -> None:
        """Until cancelled. Raises what a restart of the process raises."""
        process = self._process or await self.start()
        while True:
            await self._serve(process)
            self._stop_clock()
            ending = await process.close()
            if self._sent:
                self._sent.popleft().fail(self._failure(process, ending))
            process = await self.start()

    def _failure(self, process: HookProcess, ending: str) -> HookFailedError:
        if process.overdue:
            return HookTimeoutError(
                f"the reward hook did not return within reward.timeout_s = {self._pool.timeout_s:g} s; its process was killed"
            )
        return HookDiedError(f"the reward hook's process {ending} during the call")

    async def _serve(self, process: HookProcess) -> None:
        """Returns when the process has ended; what it had not answered is still in `_sent`."""
        for one in self._sent:
            process.send(one.call)
        if self._sent:
            self._start_clock(process)
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
            while len(self._sent) >= self._pool.depth:
                self._room.clear()
                await self._room.wait()
            one = await self._pool.waiting.get()
            self._sent.append(one)
            process.send(one.call)
            if len(self._sent) == 1:
                self._start_clock(process)

    def _take(self, reply: Reply, process: HookProcess) -> None:
        """The reply of the running call; the next one begins."""
        self._stop_clock()
        if not self._sent or not isinstance(reply, (Returned, Raised, Unusable)):
            raise HookProcessError(f"the reward hook's process sent {type(reply).__name__} while no call was running")
        one = self._sent.popleft()
        if reply.number != one.call.number:
            raise HookProcessError(
                f"the reward hook's process answered call {reply.number}; expected {one.call.number}"
            )
        self._pool.measured(asyncio.get_running_loop().time() - self._began_at)
        if isinstance(reply, Returned):
            one.succeed(reply.value)
        elif isinstance(reply, Raised):
            one.fail(HookFailedError(f"the reward hook raised {reply.reason}"))
        else:
            one.fail(BadHookResultError(reply.reason))
        if self._sent:
            self._start_clock(process)
        self._room.set()

    def _start_clock(self, process: HookProcess) -> None:
        loop = asyncio.get_running_loop()
        self._began_at = loop.time()
        self._deadline = loop.call_later(self._pool.timeout_s, process.kill_overdue)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
