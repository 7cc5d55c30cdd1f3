"""From a position and a row to the tasks that take the next ordinals; and a task of before, again.

Invariant: equal positions and rows give equal tasks. The methods read files and call hooks: keep them off the event loop.
"""

from __future__ import annotations

from typing import Any

from physarum.actors.added_rows import AddedRow
from physarum.actors.source import places
from physarum.actors.source.choice import Choice
from physarum.actors.source.cursor import Picked
from physarum.actors.source.opening import described
from physarum.actors.source.tasks import group_tasks, refill_task
from physarum.actors.states import SourcePosition
from physarum.bus.ledger import RefillRecord
from physarum.bus.records import Task, TaskClass
from physarum.configs.root import RootConfig


class Making:
    """Of one source."""

    def __init__(self, config: RootConfig, run: str, choice: Choice) -> None:
        self._source, self._run, self._choice = config.source, run, choice

    def tasks(
        self, current: SourcePosition, picked: Picked, pin: int | None, task_class: TaskClass = "p1"
    ) -> list[Task]:
        """The group of a row."""
        return group_tasks(
            picked.row,
            run=self._run,
            source=self._source.name,
            place=places.written(picked.epoch, picked.index),
            first_ordinal=current.issued,
            group_size=self._choice.group_size_at(current, current.issued),
            sampling=self._choice.sampling(current, current.issued),
            task_class=task_class,
            pin=pin,
        )

    def added(self, current: SourcePosition, sequence: int, added: AddedRow, pin: int | None) -> list[Task]:
        """The group of a row that was added at run time."""
        picked = Picked(places.ADDED, sequence, self._rendered(added.row()))
        return self.tasks(current, picked, pin, added.priority)

    def again(
        self, current: SourcePosition, record: RefillRecord, added: dict[str, Any] | None, pin: int | None
    ) -> Task:
        """The task that a refill asks for; `added`: its row, where it was added at run time."""
        first = record.ordinal - record.member
        row = self._choice.again(current, first, *places.read(record.group)) if added is None else self._rendered(added)
        return refill_task(
            row,
            record,
            run=self._run,
            group_size=self._choice.group_size_at(current, first),
            sampling=self._choice.sampling(current, first),
            pin=pin,
        )

    def _rendered(self, row: dict[str, Any]) -> dict[str, Any]:
        return described(row, self._source.chat, self._source.metadata)
