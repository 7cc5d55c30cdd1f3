"""How often and how fast a request is tried again: bounded attempts, decorrelated jitter, one deadline.

Jitter: uniform in [base, 3 * the wait before], at most max ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015),
so that requests that failed together do not come back together.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts` in a row without a new token end the request; so does `deadline_s` in all, not counted the time in which
    it waited for room on an engine, `room_s` at most each time.

    The defaults ride out an engine that is restarted elsewhere (its absence is waited for in Router.pick, not here) and
    give up within about a minute on one that answers 5xx at once.
    """

    attempts: int = 16
    base_s: float = 0.1
    max_s: float = 5.0
    deadline_s: float = 600.0
    request_timeout_s: float = 120.0
    room_s: float = 3600.0


DEFAULT_RETRY: Final = RetryPolicy()
_SHORTEST_TIMEOUT_S: Final = 0.001  # aiohttp takes 0 for "no timeout"


def decorrelated_s(rng: random.Random, base_s: float, before_s: float, max_s: float) -> float:
    """How long to wait after `before_s` (0: for the first time), in [min(base, max), max]."""
    return min(max_s, rng.uniform(base_s, max(base_s, 3.0 * before_s)))


class Retries:
    """The state of one request's retries."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._ends_at = time.monotonic() + policy.deadline_s
        self._waited_s = 0.0
        self.failures = 0
        self.last: Exception | None = None

    @property
    def remaining_s(self) -> float:
        return self._ends_at - time.monotonic()

    @property
    def exhausted(self) -> bool:
        return self.failures >= self._policy.attempts or self.remaining_s <= 0

    @property
    def request_timeout_s(self) -> float:
        """For the next HTTP request: never beyond the deadline."""
        return max(_SHORTEST_TIMEOUT_S, min(self._policy.request_timeout_s, self.remaining_s))

    @property
    def answer_limit_s(self) -> float:
        """For an answer that keeps coming."""
        return max(_SHORTEST_TIMEOUT_S, self.remaining_s)

    def failed(self, error: Exception) -> None:
        self.failures += 1
        self.last = error

    def progressed(self) -> None:
        """New tokens arrived: earlier failures no longer count."""
        self.failures = 0
        self._waited_s = 0.0

    def excuse(self, seconds: float) -> None:
        """Time in which an engine was waited for and came: it does not count."""
        self._ends_at += seconds

    async def back_off(self) -> None:
        """Wait before the next attempt, at most until the deadline."""
        self._waited_s = decorrelated_s(self._rng, self._policy.base_s, self._waited_s, self._policy.max_s)
        await asyncio.sleep(max(0.0, min(self._waited_s, self.remaining_s)))
