"""How several processes share what the engines take at once, each deciding for itself from the same announcements.

Max-min fairness (Bertsekas and Gallager, "Data Networks", 6.5.2): nobody gets more than it asks for while somebody who asks
for more has less; what nobody asks for is spread equally, so that everybody can grow. Invariant: where all compute it from
the same announcements, the shares of an engine sum to its limit, and who is allotted n places or more has at least n - 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Final

_NEWS: Final = 7 / 8


def allotments(demands: Mapping[str, int], capacity: int) -> dict[str, float]:
    """What each may have of `capacity` places; sums to it."""
    if not demands:
        return {}
    left, granted = float(capacity), dict.fromkeys(demands, 0.0)
    waiting = sorted(demands, key=lambda name: (demands[name], name))
    for done, name in enumerate(waiting):
        level = left / (len(waiting) - done)
        if demands[name] > level:
            granted.update(dict.fromkeys(waiting[done:], level))
            return granted
        granted[name] = float(demands[name])
        left -= demands[name]
    return {name: value + left / len(granted) for name, value in granted.items()}


def announced(before: int, demand: int) -> int:
    """What a process says that it asks for, having said `before`: at least what it asks for, at most 8/7 of it. A little less
    than was said is no news: everybody would hear of it."""
    return demand if demand > before or demand < before * _NEWS else before


def shares(demands: Mapping[str, int], limits: Mapping[str, int], mine: str) -> dict[str, int]:
    """How many requests `mine`, one of `demands`, may have at each engine. `limits` by engine."""
    total, end = sum(limits.values()), 0.0
    names, last = sorted(limits), 0.0
    for name, granted in sorted(allotments(demands, total).items()):
        last, end = end, end + granted
        if name == mine:
            break
    sizes = [limits[name] for name in names]
    low, high = _first(sizes, _whole(last, total)), _first(sizes, _whole(end, total))
    return {name: upper - lower for name, lower, upper in zip(names, low, high, strict=True)}


def _whole(border: float, total: int) -> int:
    return min(total, math.floor(border + 1e-6))


def _first(sizes: list[int], count: int) -> list[int]:
    """How many places of each engine are among the first `count`, where the places of all are merged evenly into one row.

    Place j of an engine with n lies at (j + 1/2) / n: any stretch of the row has places of all engines in proportion.
    """
    total = sum(sizes)
    begun = max(0.0, (count - len(sizes)) / total) if total else 0.0
    taken = [min(size, math.floor(begun * size + 0.5)) for size in sizes]
    row = [((taken[at] + 0.5) / size, at) for at, size in enumerate(sizes) if taken[at] < size]
    heapq.heapify(row)
    for _ in range(count - sum(taken)):
        _, at = heapq.heappop(row)
        taken[at] += 1
        if taken[at] < sizes[at]:
            heapq.heappush(row, ((taken[at] + 0.5) / sizes[at], at))
    return taken
