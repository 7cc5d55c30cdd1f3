"""Keeps one actor running: adopt or start, wait for its end, do what the policy says.

Where the policy gives up and others do the same work (engines of one group, rollout and reward workers), the run goes on with
them: the actor is left out, and tried again after ever longer waits. Where all others are left out too, or none was ever ready,
it ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from physarum.actors.supervisor.attendance import FINISHED, Attendance
from physarum.actors.supervisor.errors import ActorFailedError
from physarum.actors.supervisor.launcher import Launcher
from physarum.actors.supervisor.policy import Exit, GiveUp, LeaveEnded, Restart, RestartPolicy
from physarum.actors.supervisor.process import ActorProcess
from physarum.configs.origin import display_path
from physarum.configs.supervisor import SupervisorConfig

_log = logging.getLogger(__name__)

_LONGEST_OUT_S: Final = 600.0


class Keeper:
    """One (role, instance). `finishing` is set when the run ends: exits are then as they should be."""

    def __init__(
        self,
        role: str,
        instance: str,
        launcher: Launcher,
        attendance: Attendance,
        config: SupervisorConfig,
        others_stand: Callable[[], bool] = lambda: False,
    ) -> None:
        """`others_stand` says whether another actor does the same work, and is not left out."""
        self.role = role
        self.instance = instance
        self.finishing = asyncio.Event()
        self.process: ActorProcess | None = None
        self._launcher = launcher
        self._attendance = attendance
        self._policy = RestartPolicy(config)
        self._others_stand = others_stand
        self._shortest_out_s = self._out_s = config.backoff_max_s
        self._is_out = False

    @property
    def stands(self) -> bool:
        """It works, or did and is being started again."""
        return self._is_up or (self._policy.was_ever_ready and not self._is_out)

    @property
    def _is_up(self) -> bool:
        """Its process runs, and was past "starting"."""
        process = self.process
        return process is not None and not process.ended and self._attendance.was_ready(process.record.pid)

    def begin(self) -> None:
        """Adopts the actor when it runs already, else starts it."""
        self.process = self._launcher.adopt(self.instance)
        if self.process is None:
            self._start()
        else:
            _log.info("%s adopted (pid %d)", self.instance, self.process.record.pid)

    async def keep(self) -> None:
        """Returns when the actor has ended for good. Raises ActorFailedError when it cannot be kept running."""
        hearing = asyncio.create_task(self._attendance.expect(self.role, self.instance))
        hearing.add_done_callback(self._heard_or_not)
        try:
            while self.process is not None:
                process = self.process
                ended = await process.wait()
                if self.finishing.is_set():
                    self._attendance.forget(self.instance)
                    return
                await self._after(process, ended)
        finally:
            hearing.cancel()

    def _heard_or_not(self, hearing: asyncio.Task[None]) -> None:
        if not hearing.cancelled() and (error := hearing.exception()) is not None:
            _log.error("%s cannot be listened to, so nobody here will see whether it hangs: %r", self.instance, error)

    def kill_hung(self) -> None:
        if self.process is not None:
            _log.error("%s does not answer any more; killing it", self.instance)
            self.process.kill()

    def _start(self) -> None:
        self.process = self._launcher.start(self.role, self.instance, self._policy.restarts)
        _log.info("%s started (pid %d)", self.instance, self.process.record.pid)

    async def _after(self, process: ActorProcess, ended: Exit) -> None:
        pid = process.record.pid
        state = self._attendance.state(self.instance, pid)
        ready = self._attendance.was_ready(pid)
        await self._attendance.ended(self.instance, pid)
        if ready:
            self._is_out, self._out_s = False, self._shortest_out_s
        if self.finishing.is_set():  # it was let go meanwhile: its end is as it should be
            self.process = None
            return
        match self._policy.after_exit(ended, ready=ready, finished=state == FINISHED, now=time.monotonic()):
            case LeaveEnded():
                _log.info("%s has finished its work", self.instance)
                self.process = None
            case GiveUp(reason):
                failure = self._failure(process, reason, state)
                if not self._others_stand():
                    raise ActorFailedError(f"{failure}\n{_REMEDY}")
                await self._leave_out(failure)
            case Restart(delay_s):
                _log.warning(
                    "%s %s (last state: %s); starting it again in %.1f s", self.instance, ended, state, delay_s
                )
                self.process = None
                await self._pause(delay_s)
                if not self.finishing.is_set():
                    self._start()

    async def _leave_out(self, failure: str) -> None:
        _log.error("%s\nThe run goes on with the others; it is tried again in %.0f s", failure, self._out_s)
        self.process, self._is_out = None, True
        await self._pause(self._out_s)
        self._out_s = min(_LONGEST_OUT_S, 2 * self._out_s)
        if not self.finishing.is_set():
            self._start()

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self.finishing.wait()

    def _failure(self, process: ActorProcess, reason: str, state: str) -> str:
        log = display_path(Path(process.record.log))
        return (
            f"the actor {self.role}/{self.instance} {reason}; its last state was {state!r}. Its last lines in {log}:\n"
            f"{_indented(process.log_tail())}"
        )


_REMEDY: Final = (
    "Remedy: correct what they name, then start again: the same configuration goes on where this run stopped, a changed one"
    " needs another name (`run.name=NAME`)"
)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
