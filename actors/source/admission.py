"""How many tasks may be under way, so that the age bound can hold: a pure fold over LEDGER and DEAD.

`free`: as many as the streams hold. `pace`: see pace.py.

`count`: a group is issued only while

    issued - disposed + unserved + group_size <= (age.bound + 1) * groups_per_batch * group_size

(staleness control by counting, AReaL, arXiv 2505.24298, eq. 3, with the steps counted whose weights the engines serve):
`unserved` are the tasks of steps whose weights are on their way to the engines (clock.py). Without it a trainer that is the
slower side has every batch begun by the weights before, and those tokens are over the bound when they are trained. With a
bound of at least 1 what one step needs may be out in any case, so that engines which never take a version stop no run.

The group size on the right is the largest of the next group and those that are out: a batch counts groups, so whatever a
curriculum changes, `groups_per_batch` of them fit. Disposed are the tasks whose executions were trained,
masked or dropped by a surviving step, or that are dead. Tasks are counted, not executions: two executions of one task
dispose of it once. A rollback brings the tasks of the steps that it voids back under way; it never goes behind the last
durable checkpoint, so that what is remembered step by step is only what came after that.
"""

from __future__ import annotations

from typing import NamedTuple

from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import DurableRecord, Numbered, PlanRecord, RollbackRecord, StepRecord
from physarum.configs.root import RootConfig

Tasks = dict[int, IntervalSet]
"""Ordinals by attempt: a refill is a task of its own."""


class _Step(NamedTuple):
    """A surviving step: the sequence of its plan in LEDGER, and the tasks that it disposed of."""

    plan: int
    tasks: Tasks


class Disposals:
    """The ordinals of one source's tasks that are done with. Fed in the order of LEDGER; DEAD in any order."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._plans: dict[int, Tasks] = {}
        self._steps: list[_Step] = []
        self._durable: Tasks = {}
        self._dead: Tasks = {}
        self._disposed: Tasks = {}
        self._unnamed = 0
        self._count = 0

    @property
    def count(self) -> int:
        """Tasks that are done with."""
        return self._count

    @property
    def dead_count(self) -> int:
        """Those of them that died."""
        return self._unnamed + sum(len(ordinals) for ordinals in self._dead.values())

    @property
    def oldest_out(self) -> int:
        """The first ordinal whose task is not done with (or not issued yet)."""
        return self._disposed.get(0, IntervalSet()).floor(0)

    def record(self, item: Numbered) -> None:
        """One record of LEDGER."""
        record = item.record
        if isinstance(record, PlanRecord):
            ours: Tasks = {}
            for place in sorted(record.places, key=lambda place: place.ordinal):
                if place.source == self._source:
                    ours.setdefault(place.attempt, IntervalSet()).add(place.ordinal)
            self._plans[item.sequence] = ours
        elif isinstance(record, StepRecord):
            tasks = self._plans.get(record.plan, {})
            self._steps.append(_Step(record.plan, tasks))
            self._add(tasks)
        elif isinstance(record, RollbackRecord):
            self._void(record)
        elif isinstance(record, DurableRecord):
            self._settle(record.last_plan)

    def dead(self, ordinal: int, attempt: int = 0) -> None:
        """A task of this source that ended in DEAD."""
        self._dead.setdefault(attempt, IntervalSet()).add(ordinal)
        self._add({attempt: IntervalSet((ordinal,))})

    def dead_unnamed(self) -> None:
        """A dead letter whose task cannot be read any more: it can only be counted."""
        self._unnamed += 1
        self._count += 1

    def _void(self, rollback: RollbackRecord) -> None:
        """As `ledger.surviving_steps`: steps whose plan the takeover executes again do not count."""
        kept = [step for step in self._steps if step.plan <= rollback.last_plan]
        if len(kept) == len(self._steps):
            return
        self._steps = kept
        self._disposed, self._count = {}, self._unnamed
        for tasks in (self._dead, self._durable, *(step.tasks for step in kept)):
            self._add(tasks)

    def _settle(self, last_plan: int) -> None:
        """Steps up to `last_plan` are covered by a checkpoint: none of them will be void."""
        for step in self._steps:
            if step.plan <= last_plan:
                _union(self._durable, step.tasks)
        self._steps = [step for step in self._steps if step.plan > last_plan]
        self._plans = {sequence: tasks for sequence, tasks in self._plans.items() if sequence > last_plan}

    def _add(self, tasks: Tasks) -> None:
        self._count += _union(self._disposed, tasks)


def _union(into: Tasks, tasks: Tasks) -> int:
    """Adds `tasks`; how many were new."""
    new = 0
    for attempt, ordinals in tasks.items():
        present = into.setdefault(attempt, IntervalSet())
        new += sum(present.add(ordinal) for ordinal in ordinals)
    return new


class Sizes(NamedTuple):
    """Tasks of the next group, and of the largest group of it and those that are out."""

    following: int
    largest: int


class Limit(NamedTuple):
    """Groups that may be under way; and how many may be whatever is unserved."""

    groups: int
    always: int


def admitted(config: RootConfig) -> Limit | None:
    """None when only the size of TASKS bounds what is under way."""
    age, batch = config.age.of(config.source.name), config.trainer.groups_per_batch
    return None if age.admission == "free" else Limit((age.bound + 1) * batch, batch if age.bound else 0)


def has_room(issued: int, disposed: int, sizes: Sizes, limit: Limit | None, unserved: int = 0) -> bool:
    """Whether one more group may be issued. `issued`, `disposed`, `unserved`: tasks."""
    out = issued - disposed + sizes.following
    return limit is None or out + unserved <= limit.groups * sizes.largest or out <= limit.always * sizes.largest
