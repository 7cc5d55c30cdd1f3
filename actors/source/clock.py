"""What had been trained at the weights that engines serve: the clock of admission. Pure.

Weights are made by a step, published, and served some time later; what is generated meanwhile is of the weights before. So
admission does not count by the steps that were made but by those whose weights serve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from physarum.bus.ledger import Numbered, RollbackRecord, StepRecord
from physarum.bus.version import Fork, Version, effective_number

_MARKS: Final = 1024
"""Steps whose counts are remembered: an engine further behind than this holds the source."""


class _Mark(NamedTuple):
    """After a step: its plan's sequence, the number of the weights, tasks that steps had disposed of."""

    plan: int
    number: int
    trained: int


class Clock:
    """One source's. Fed in the order of LEDGER."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque([_Mark(0, 0, 0)], maxlen=_MARKS)
        self._forks: tuple[Fork, ...] = ()

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
        return self._trained_at(min((effective_number(version, self._forks) for version in served), default=0))

    def unserved(self, served: Iterable[Version], publish_every: int) -> int:
        """Tasks trained in steps whose weights are due to be served (the newest multiple of `publish_every`) and are not yet,
        by the slowest engine. Those that are not due are not waited for. 0 when nothing serves: nothing is generated either."""
        oldest = min((effective_number(version, self._forks) for version in served), default=None)
        if oldest is None or not self._marks:
            return 0
        newest = self._marks[-1].number
        due = newest - newest % publish_every
        return max(0, self._trained_at(due) - self._trained_at(oldest))

    def _trained_at(self, number: int) -> int:
        return max((mark.trained for mark in self._marks if mark.number <= number), default=0)
