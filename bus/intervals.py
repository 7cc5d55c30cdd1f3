"""Sets of non-negative integers that are mostly dense: sequences consumed, tasks disposed of.

Memory is proportional to the number of gaps, not to the number of members, so a set over a million samples that are
consumed nearly in order stays a handful of numbers.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


class IntervalSet:
    """Disjoint half-open intervals [start, end), sorted, never touching."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for value in values:
            self.add(value)

    def add(self, value: int) -> bool:
        """Adds `value`; False when it was there already."""
        at = bisect.bisect_right(self._starts, value) - 1
        if at >= 0 and value < self._ends[at]:
            return False
        joins_left = at >= 0 and self._ends[at] == value
        joins_right = at + 1 < len(self._starts) and self._starts[at + 1] == value + 1
        if joins_left and joins_right:
            self._ends[at] = self._ends.pop(at + 1)
            self._starts.pop(at + 1)
        elif joins_left:
            self._ends[at] = value + 1
        elif joins_right:
            self._starts[at + 1] = value
        else:
            self._starts.insert(at + 1, value)
            self._ends.insert(at + 1, value + 1)
        return True

    def __contains__(self, value: int) -> bool:
        at = bisect.bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._ends[at]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.intervals())

    def __iter__(self) -> Iterator[int]:
        for start, end in self.intervals():
            yield from range(start, end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self.intervals() == other.intervals()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def intervals(self) -> list[tuple[int, int]]:
        """The set as sorted [start, end) pairs: its serial form."""
        return list(zip(self._starts, self._ends, strict=True))

    def floor(self, base: int) -> int:
        """The largest n such that all of [base, n) are members; `base` when `base` itself is not."""
        at = bisect.bisect_right(self._starts, base) - 1
        return self._ends[at] if at >= 0 and base < self._ends[at] else base

    def discard_below(self, bound: int) -> None:
        """Forgets all members below `bound`."""
        kept = [(max(start, bound), end) for start, end in self.intervals() if end > bound]
        self._starts = [start for start, _ in kept]
        self._ends = [end for _, end in kept]

    @classmethod
    def of_intervals(cls, intervals: Iterable[tuple[int, int]]) -> IntervalSet:
        """The inverse of `intervals`: pairs must be sorted, disjoint and not touching."""
        made = cls()
        for start, end in intervals:
            if start >= end or (made._ends and start <= made._ends[-1]):
                raise ValueError(f"interval [{start}, {end}) is empty, overlaps or touches the one before it")
            made._starts.append(start)
            made._ends.append(end)
        return made
