"""What to do when an actor's process has ended. Pure: exits and times go in, one decision comes out.

run is finishing, or the actor announced "finished"    -> leave it ended
exit status 78 (EXIT_UNRECOVERABLE)                    -> give up at once: a new start would fail in the same way
two failures in a row, never ready                     -> give up: it does not start
more than max_restarts restarts within window_s        -> give up: it does not stay up
anything else                                          -> restart after backoff_s * 2^n, at most backoff_max_s
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from physarum.actors.errors import EXIT_UNRECOVERABLE
from physarum.configs.supervisor import SupervisorConfig

_STARTS_TRIED: Final = 2


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `status` as in subprocess: negative is a signal; None when it was not our child."""

    status: int | None

    def __str__(self) -> str:
        if self.status is None:
            return "ended (adopted from another supervisor, so its exit status is not known)"
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on with this actor; `reason` continues the sentence 'the actor X ...'."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveEnded:
    """It has done its work."""


Decision: TypeAlias = Restart | GiveUp | LeaveEnded


class RestartPolicy:
    """The policy and the memory of one actor. Times are monotonic seconds."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._restarts_at: deque[float] = deque()
        self._was_ever_ready = False
        self._failed_starts = 0
        self.restarts = 0

    @property
    def was_ever_ready(self) -> bool:
        """Whether a process that has ended was ever past "starting"."""
        return self._was_ever_ready

    def after_exit(self, ended: Exit, *, ready: bool, finished: bool, now: float) -> Decision:
        """`ready`: this process was ever past "starting". `finished`: it announced that its work is done."""
        if finished and ended.status in (0, None):
            return LeaveEnded()
        if ended.status == EXIT_UNRECOVERABLE:
            return GiveUp(f"{ended}, which says that starting it again cannot help")
        self._was_ever_ready |= ready
        self._failed_starts += 1
        if not self._was_ever_ready and self._failed_starts >= _STARTS_TRIED:
            return GiveUp(f"{ended}, for the {_ordinal(self._failed_starts)} time without ever having been ready")
        return self._restart(ended, now)

    def _restart(self, ended: Exit, now: float) -> Decision:
        config = self._config
        while self._restarts_at and now - self._restarts_at[0] > config.window_s:
            self._restarts_at.popleft()
        recent = len(self._restarts_at)
        if recent >= config.max_restarts:
            return GiveUp(
                f"{ended} after {recent} restarts within {config.window_s:g} s"
                f" (supervisor.max_restarts is {config.max_restarts})"
            )
        self._restarts_at.append(now)
        self.restarts += 1
        # The exponent is bounded only to keep 2**n a small integer; backoff_max_s is the bound that matters.
        return Restart(min(config.backoff_max_s, config.backoff_s * 2 ** min(recent, 32)))


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
