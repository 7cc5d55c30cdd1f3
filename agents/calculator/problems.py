"""Addition problems as pure functions of (seed, epoch, index): no generator state, so any position can be resumed.

Held-out and training problems are disjoint by construction: a hash of the pair alone (no seed) decides to which side it
belongs, 1 in 16 being held out; each source draws again until it finds a pair of its own side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import xxhash

from physarum.agents.calculator import dialogue
from physarum.agents.errors import ProblemSpaceError

MAX_OPERAND: Final = 1000
HELD_OUT_ONE_IN: Final = 16
# With 1 in 16 held out a draw fails 15 times of 16: 4096 misses in a row have probability 1e-115.
_MAX_DRAWS: Final = 4096

Pair = tuple[int, int]


def hashed(*key: object) -> int:
    """A 64-bit hash of `key`: the source of all randomness here."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, key)).encode())


def uniform(*key: object) -> float:
    """In [0, 1), from the hash of `key`."""
    return hashed(*key) / 2.0**64


def held_out(pair: Pair) -> bool:
    """Does `pair` belong to the held-out side?"""
    return hashed("side", *pair) % HELD_OUT_ONE_IN == 0


def draws(low: int, high: int, *key: object) -> Iterator[Pair]:
    """Pairs from [low, high) x [low, high), a deterministic stream for `key`, as long as _MAX_DRAWS."""
    width = high - low
    for attempt in range(_MAX_DRAWS):
        value = hashed(*key, attempt)
        yield low + value % width, low + value // width % width


def training_pair(low: int, high: int, *key: object) -> Pair:
    """The first pair of the stream that is not held out."""
    for pair in draws(low, high, *key):
        if not held_out(pair):
            return pair
    raise ProblemSpaceError(f"every pair of operands in [{low}, {high}) is held out; widen the range")


def check_range(low: int, high: int) -> None:
    if not 0 <= low < high <= MAX_OPERAND:
        raise ProblemSpaceError(f"operands are drawn from [{low}, {high}); expected 0 <= low < high <= {MAX_OPERAND}")


def problem_row(pair: Pair) -> dict[str, Any]:
    """A task row: the question, its four-digit label and the operands."""
    a, b = pair
    return {"prompt": dialogue.question(a, b), "label": dialogue.number(a + b), "metadata": {"a": a, "b": b}}


class Problems:
    """Hook `source.hook`: training problems, new ones in every epoch."""

    def __init__(self, seed: int, *, low: int = 0, high: int = MAX_OPERAND, size: int = 1_000_000) -> None:
        check_range(low, high)
        self._seed, self._low, self._high, self._size = seed, low, high, size

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return problem_row(training_pair(self._low, self._high, "train", self._seed, epoch, index))


class HeldOut:
    """Hook `evaluation.hook`: `problems` distinct problems, equal in every epoch, in no training stream."""

    def __init__(self, seed: int, *, problems: int = 256, low: int = 0, high: int = MAX_OPERAND) -> None:
        check_range(low, high)
        pairs: dict[Pair, None] = {}
        for index in range(problems):
            fresh = (pair for pair in draws(low, high, "held-out", seed, index) if held_out(pair) and pair not in pairs)
            pair = next(fresh, None)
            if pair is None:
                raise ProblemSpaceError(
                    f"found {len(pairs)} held-out problems with operands in [{low}, {high}), expected {problems};"
                    f" ask for fewer or widen the range (1 pair in {HELD_OUT_ONE_IN} is held out)"
                )
            pairs[pair] = None
        self._pairs = list(pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return problem_row(self._pairs[index])
