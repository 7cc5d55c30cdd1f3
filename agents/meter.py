"""When was at least one request in flight? The union of intervals: overlap is never counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Interval = tuple[float, float]


class BusyMeter:
    """Merges overlapping busy intervals of one event loop. `clock` gives Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._in_flight = 0
        self._since = 0.0
        self._closed: list[Interval] = []

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The body counts as busy time."""
        if self._in_flight == 0:
            self._since = self._clock()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._close(self._clock())

    def pop(self) -> list[Interval]:
        """(start, end) in Unix seconds since the last pop, ordered and disjoint; an open interval is cut at now."""
        if self._in_flight:
            now = self._clock()
            self._close(now)
            self._since = max(now, self._since)
        closed, self._closed = self._closed, []
        return closed

    def _close(self, end: float) -> None:
        if end > self._since:  # a clock set back in between yields no negative interval
            self._closed.append((self._since, end))
