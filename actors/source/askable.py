"""Up to which ordinal no task can be asked for again: a pure fold over LEDGER and DEAD, for one source.

A refill issues a task again as it was issued first, so what that takes (a curriculum's stage) is kept until the task is
settled:

    trained, or dropped for another reason than its age (no other attempt will be asked for)
    dropped for its age in the newest attempt that was asked for (a refill is recorded before the drop that it follows)
    dead in attempt `groups.refills` or later, or for good
    missing when its group was closed, and the group has left

Invariant: whoever asks for a task again has recorded so before the record that settles it. What was asked for and is not
issued yet is the caller's to keep.
"""

from __future__ import annotations

from typing import Final

from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import Dropped, GroupClosedRecord, Numbered, Place, Planned, PlanRecord, RefillRecord

_BY_AGE: Final = ("over_age", "hopeless")
_UNDECIDED: Final = ("duplicate", "late")
"""Drops of a second execution: the first one may still be dropped for its age."""


class Askable:
    """`refills`: `groups.refills`, how many further attempts a task may get."""

    def __init__(self, source: str, refills: int) -> None:
        self._source, self._refills = source, refills
        self._settled = IntervalSet()
        self._newest: dict[int, int] = {}
        self._missing: dict[str, list[int]] = {}

    @property
    def oldest(self) -> int:
        """The first ordinal that may still be asked for again (or is not issued yet)."""
        return self._settled.floor(0)

    def record(self, item: Numbered) -> None:
        """One record of LEDGER."""
        record = item.record
        if isinstance(record, RefillRecord):
            if record.source == self._source and record.ordinal not in self._settled:
                self._newest[record.ordinal] = max(record.attempt, self._newest.get(record.ordinal, 0))
        elif isinstance(record, GroupClosedRecord):
            if record.missing and record.group.partition("/")[0] == self._source:
                self._missing[record.group] = record.missing
        elif isinstance(record, PlanRecord):
            for place in record.places:
                if place.source == self._source:
                    self._left(place)

    def dead(self, ordinal: int, attempt: int, *, final: bool = False) -> None:
        """A task of this source ended in DEAD. `final`: nobody asks for another attempt."""
        if final or attempt >= self._refills:
            self._settle(ordinal)

    def _left(self, place: Place) -> None:
        if _settles(place) or (_by_age(place) and place.attempt >= self._newest.get(place.ordinal, 0)):
            self._settle(place.ordinal)
        group, _, member = place.task.partition("+")[0].rpartition("/")
        for missing in self._missing.pop(group, ()):
            self._settle(place.ordinal - int(member) + missing)

    def _settle(self, ordinal: int) -> None:
        self._settled.add(ordinal)
        self._newest.pop(ordinal, None)


def _settles(place: Place) -> bool:
    return isinstance(place, Planned) or (isinstance(place, Dropped) and place.reason not in (*_BY_AGE, *_UNDECIDED))


def _by_age(place: Place) -> bool:
    return isinstance(place, Dropped) and place.reason in _BY_AGE
