"""Which of two ways is the quicker one, by what each took: for work that repeats, where nobody knows beforehand.

Of chunks: as a whole over a fast network, as a difference over a slow one or from a service whose processors are free.
"""

from __future__ import annotations

import math
from typing import Final, Literal

Differences = Literal["auto", "always", "never"]
"""Whether chunks are taken as differences: `auto` as it is quicker."""

_TRIALS: Final = 3
_AGAIN_EVERY: Final = 32
_NEWEST: Final = 0.5
"""Weight of the newest measurement in the mean."""


class Pace:
    """`chosen` is asked before each piece of work, `took` told after it. From any thread: a lost update costs a trial."""

    def __init__(self, policy: Differences = "auto") -> None:
        self._policy = policy
        self._seconds: dict[bool, float] = {}
        self._count = {True: 0, False: 0}

    def chosen(self) -> bool:
        """Whether to take a difference. Under `auto` each way is tried a few times, and the slower one now and then."""
        if self._policy != "auto":
            return self._policy == "always"
        for way in (True, False):
            if self._count[way] < _TRIALS:
                return way
        better = self._seconds[True] < self._seconds[False]
        return not better if sum(self._count.values()) % _AGAIN_EVERY == 0 else better

    def took(self, as_difference: bool, seconds_per_byte: float) -> None:
        before = self._seconds.get(as_difference, math.inf)
        before = seconds_per_byte if math.isinf(before) else before
        self._seconds[as_difference] = before + _NEWEST * (seconds_per_byte - before)
        self._count[as_difference] += 1

    def failed_as_difference(self) -> None:
        """It took the time, and brought nothing: whole chunks are quicker until one comes as a difference again."""
        self._seconds[True] = math.inf
        self._count[True] += 1
