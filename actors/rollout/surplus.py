"""Cuts off episodes whose group went on without them: what they still make would be dropped(late), and their slots with it.

The trainer records in LEDGER that a group is closed (enough members came, or its deadline passed) and who is missing. Each
worker follows those records; a task that it holds or is handed later ends at once. Invariant: only members that a record names
are cut off, so the trainer drops them, whatever comes first; a record that a worker missed costs tokens, never an execution.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

from physarum.actors.context import Context
from physarum.actors.rollout.cutting import CutOffError, Cuttable
from physarum.bus import log
from physarum.bus.ledger import GroupClosedRecord, decode_entry
from physarum.bus.log import LogReader
from physarum.bus.records import Task

T = TypeVar("T")

_WAIT_S: Final = 30.0
_REMEMBERED: Final = 10_000
"""Closed groups of which a member may still be handed to this worker."""


class SurplusError(CutOffError):
    """The episode's group is closed, and trained or dropped without it."""


class Surplus:
    """The episodes of one worker, by group."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: defaultdict[str, dict[tuple[int, int], Cuttable]] = defaultdict(dict)
        self._missing: OrderedDict[str, frozenset[int]] = OrderedDict()

    @property
    def wanted(self) -> bool:
        """Whether groups are closed before all of their members are there."""
        groups = self._context.config.groups
        grouped = self._context.config.reward.group is not None
        return grouped or groups.enough is not None or groups.deadline_s is not None

    async def follow(self) -> None:
        """Reads the records that are made from now on, for ever."""
        last = (await log.state(self._context.bus, "ledger")).last
        async with aclosing(LogReader(self._context.bus, "ledger", last + 1).batches(_WAIT_S)) as batches:
            async for batch in batches:
                for entry in batch:
                    record = decode_entry(entry).record
                    if isinstance(record, GroupClosedRecord):
                        self.closed(record)

    def closed(self, record: GroupClosedRecord) -> None:
        """Those that are missing are not waited for."""
        gone = frozenset(record.missing if record.trained else range(record.size))
        self._missing[record.group] = gone
        for (member, _), work in self._running.get(record.group, {}).items():
            if member in gone:
                work.cut(_late(record.group))
        while len(self._missing) > _REMEMBERED:
            self._missing.popitem(last=False)

    async def run(self, task: Task, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`. Raises SurplusError as soon as the task's group is closed without it."""
        if task.member in self._missing.get(task.group, ()):
            raise _late(task.group)
        key, cuttable = (task.member, task.attempt), Cuttable()
        self._running[task.group][key] = cuttable
        try:
            return await cuttable.run(work())
        finally:
            del self._running[task.group][key]
            if not self._running[task.group]:
                del self._running[task.group]


def _late(group: str) -> SurplusError:
    return SurplusError(f"group {group} went on without it")
