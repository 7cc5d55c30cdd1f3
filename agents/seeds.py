"""A seed for each request, so that an engine that samples deterministically makes the same tokens when a task is run again.

Invariant: a seed follows from the base, the task's id, the prompt and how often the task asked for that prompt before, and from
nothing of the run's course: neither from the engine, nor from when its other requests came. Members of a group differ by id.
SGLang draws token t of a sequence from (seed, t), so tokens that are held and gone on behind stay what they would have been.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

_BITS: Final = 31
"""Every release of SGLang takes so many."""


class Seeds:
    """Of one run of one task."""

    def __init__(self, base: int, task: str) -> None:
        self._base, self._task = base, task
        self._asked: Counter[bytes] = Counter()

    def next(self, prompt: npt.NDArray[np.int32]) -> int:
        """For a request with this prompt, int32 [P]."""
        tokens = xxhash.xxh3_128_digest(np.ascontiguousarray(prompt, dtype="<i4").tobytes())
        state = xxhash.xxh3_64(f"{self._base}/{self._task}/{self._asked[tokens]}/".encode())
        self._asked[tokens] += 1
        state.update(tokens)
        return state.intdigest() >> (64 - _BITS)
