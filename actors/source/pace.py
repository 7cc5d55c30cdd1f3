"""Admission `pace`: a task is issued only if nothing that is out can become older than the bound by it. Pure.

A step takes one batch. While the oldest task that is out was issued when `base` tasks had been trained, and at most
base + (bound + 1) batches were ever issued, at most `bound` steps can go past it: the tasks for one more do not exist.
So a group is issued only while

    issued - base(oldest task out) + group_size <= (age.bound + 1) * groups_per_batch * group_size

(group_size on the right: the largest of the next group and those that are out, as in admission.py), which is `count` (base:
trained by now) with the clock of the oldest task. `base` is what had been trained at the number
that the slowest engine *served*, so that a publication that takes long counts too. The price: generation waits for
stragglers. What one step needs may be out whatever the oldest task's clock: no step can go past it without it. Dead tasks
count as never issued. A group that lost members counts as less than it is: then the trainer masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from physarum.actors.source.admission import Sizes
from physarum.actors.source.clock import Clock
from physarum.bus.version import Version


class Pace:
    """One source's clock: `bound` and `groups_per_batch` as configured."""

    def __init__(self, clock: Clock, bound: int, groups_per_batch: int) -> None:
        self._clock, self._bound, self._groups_per_batch = clock, bound, groups_per_batch
        self._issued: deque[tuple[int, int]] = deque()
        self._known_from = 0

    def begin(self, first: int) -> None:
        """Ordinals below `first` were issued before, by a source that left no notes."""
        self._known_from = first

    def base(self, served: Iterable[Version] | None) -> int:
        """As Clock.base."""
        return self._clock.base(served)

    def note(self, through: int, base: int) -> None:
        """All ordinals below `through` are issued; those that were not before, at `base`."""
        if self._issued and self._issued[-1][1] == base:
            self._issued.pop()
        self._issued.append((through, base))

    def has_room(self, issued: int, dead: int, oldest: int, base: int, sizes: Sizes) -> bool:
        """Whether a group may be issued at `base`. `issued`, `dead`: tasks; `oldest`: the first ordinal that is neither
        trained, masked, dropped nor dead."""
        batch = self._groups_per_batch * sizes.largest
        limit = (self._bound + 1) * batch
        clock = min(base, self._base_of(oldest, dead, base, limit))
        within = issued - dead + sizes.following
        return within - clock <= limit or within - base <= batch

    def _base_of(self, oldest: int, dead: int, now: int, limit: int) -> int:
        """When the task was issued; for one that an earlier source issued, the earliest that its admission allowed."""
        while self._issued and self._issued[0][0] <= oldest:
            self._known_from = self._issued.popleft()[0]
        if oldest < self._known_from:
            return max(0, oldest + 1 - dead - limit)
        return self._issued[0][1] if self._issued else now
