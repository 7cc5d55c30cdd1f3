"""Whose turn it is where batches are made in the order of admission (consumption `wait`). Pure.

A group is in turn when every group of its source that was issued before it has left, or may be taken too, or is known to
bring nothing. Ordinals count a source's tasks in the order of issue without gaps, so what is still under way is seen from
what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from physarum.actors.trainer.groups import Group
from physarum.bus.intervals import IntervalSet


class Turns:
    """`waits` says of a source whether its groups stand in line; `disposed`: ordinals that left in earlier plans, by lineage:
    whichever attempt left, the ordinal brings nothing more."""

    def __init__(self, waits: Callable[[str], bool], disposed: Mapping[str, IntervalSet]) -> None:
        self._waits = waits
        self._gone: dict[str, IntervalSet] = {}
        for name, ordinals in disposed.items():
            self.pass_over(name.partition("+")[0], ordinals)

    def skip(self, source: str, first: int, size: int) -> None:
        """The group of these ordinals was taken, or brings nothing: those behind it do not wait for it."""
        self.pass_over(source, range(first, first + size))

    def pass_over(self, source: str, ordinals: Iterable[int]) -> None:
        """These ordinals bring nothing more."""
        if self._waits(source):
            gone = self._gone.setdefault(source, IntervalSet())
            for ordinal in ordinals:
                gone.add(ordinal)

    def in_turn(self, complete: Iterable[Group]) -> list[Group]:
        """Groups that may be taken: as they became complete, but those of sources that wait behind them and in order."""
        found: list[Group] = []
        lines: dict[str, list[Group]] = {}
        for group in complete:
            if self._waits(group.source):
                lines.setdefault(group.source, []).append(group)
            else:
                found.append(group)
        for source, groups in lines.items():
            found += self._unbroken(source, sorted(groups, key=lambda group: group.first_ordinal))
        return found

    def all_in_order(self, complete: Iterable[Group]) -> list[Group]:
        """Every complete group, those in turn first: where nothing more comes, nothing is waited for."""
        groups = list(complete)
        turn = self.in_turn(groups)
        known = {group.name for group in turn}
        late = [group for group in groups if group.name not in known]
        return turn + sorted(late, key=lambda group: (group.source, group.first_ordinal))

    def _unbroken(self, source: str, groups: list[Group]) -> list[Group]:
        gone = self._gone.get(source, IntervalSet())
        expected = gone.floor(0)
        for index, group in enumerate(groups):
            if group.first_ordinal > expected:
                return groups[:index]
            expected = gone.floor(max(expected, group.first_ordinal + group.size))
        return groups
