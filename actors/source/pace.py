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
from typing import Final, NamedTuple

from physarum.actors.source.admission import Sizes
from physarum.bus.ledger import Numbered, RollbackRecord, StepRecord
from physarum.bus.version import Fork, Version, effective_number

_MARKS: Final = 1024
"""Steps whose counts are remembered: an engine further behind than this holds the source."""


class _Mark(NamedTuple):
    """After a step: its plan's sequence, the number of the weights, tasks that steps had disposed of."""

    plan: int
    number: int
    trained: int


class Pace:
    """One source's clock: `bound` and `groups_per_batch` as configured."""

    def __init__(self, bound: int, groups_per_batch: int) -> None:
        self._bound, self._groups_per_batch = bound, groups_per_batch
        self._marks: deque[_Mark] = deque([_Mark(0, 0, 0)], maxlen=_MARKS)
        self._forks: tuple[Fork, ...] = ()
        self._issued: deque[tuple[int, int]] = deque()
        self._known_from = 0

    def begin(self, first: int) -> None:
        """Ordinals below `first` were issued before, by a source that left no notes."""
        self._known_from = first

    def record(self, item: Numbered, trained: int) -> None:
        """One record of LEDGER; `trained`: tasks that surviving steps have disposed of, this one included."""
        record = item.record
        if isinstance(record, StepRecord):
            self._marks.append(_Mark(record.plan, record.number, trained))
        elif isinstance(record, RollbackRecord):
            self._forks += (Fork(record.new_epoch, record.fork),)
            self._marks = deque((mark for mark in self._marks if mark.plan <= record.last_plan), maxlen=_MARKS)

    def base(self, served: Iterable[Version] | None) -> int:
        """Tasks that had been trained at the oldest of the versions served; None: at the newest weights. 0 when nothing is
        served yet, or something older than is remembered."""
        if served is None:
            return self._marks[-1].trained if self._marks else 0
        numbers = [effective_number(version, self._forks) for version in served]
        oldest = min(numbers, default=0)
        return max((mark.trained for mark in self._marks if mark.number <= oldest), default=0)

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
