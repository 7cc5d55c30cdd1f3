"""Members of groups that wait for each other. Pure: time and messages are the caller's.

Invariant: what was added is handed out exactly once, with its group (all of it, or as many as are enough), or with those that
came when the group is taken; what comes after its group had been compared is told apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from physarum.bus.records import Task

MemberT = TypeVar("MemberT")

_REMEMBERED: Final = 10_000
"""Groups of which a member may still come; of one that was forgotten it waits for others in vain, and is compared alone."""


@dataclass(slots=True)
class Gathered(Generic[MemberT]):
    """One group: per member's number what came, several where a task was executed twice. `since`: when the first one came."""

    size: int
    since: float = 0.0
    members: dict[int, list[MemberT]] = field(default_factory=dict)

    @property
    def compared(self) -> list[MemberT]:
        """The first of each member, by its number."""
        return [self.members[number][0] for number in sorted(self.members)]

    @property
    def all(self) -> list[MemberT]:
        return [one for several in self.members.values() for one in several]

    @property
    def doubles(self) -> Iterable[tuple[int, MemberT]]:
        """Further executions of a member, with the place of the first one in `compared`."""
        for place, number in enumerate(sorted(self.members)):
            for further in self.members[number][1:]:
                yield place, further


class Gathering(Generic[MemberT]):
    """All groups that are not complete."""

    def __init__(self, enough: int | None = None) -> None:
        """`enough`: how many members make a group, where it is not all of them."""
        self._enough = enough
        self._open: dict[str, Gathered[MemberT]] = {}
        self._out: set[str] = set()
        self._settled: OrderedDict[str, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Members that were added and not handed out."""
        return sum(len(group.all) for group in self._open.values())

    def add(self, task: Task, member: MemberT, now: float = 0.0) -> Gathered[MemberT] | None:
        """The group, once `member` completes it; it is then handed out, and `settle` or `failed` says what became of it."""
        group = self._open.setdefault(task.group, Gathered(task.group_size, now))
        group.members.setdefault(task.member, []).append(member)
        return self.take(task.group) if self.has_enough(task.group) else None

    def has_enough(self, group: str) -> bool:
        """Whether so many of an open group wait here as make one."""
        found = self._open[group]
        return len(found.members) >= (found.size if self._enough is None else min(self._enough, found.size))

    def waits_since(self, group: str) -> float:
        """When the first member of an incomplete group came."""
        return self._open[group].since

    def settle(self, group: str) -> list[MemberT]:
        """A group that was handed out has its rewards; what came of it meanwhile."""
        self._out.discard(group)
        self._settled[group] = None
        while len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        late = self._open.pop(group, None)
        return [] if late is None else late.all

    def is_settled(self, group: str) -> bool:
        return group in self._settled

    def failed(self, group: str) -> bool:
        """A group that was handed out has no rewards, its members may come again; whether others of it wait here."""
        self._out.discard(group)
        return group in self._open

    def take(self, group: str) -> Gathered[MemberT] | None:
        """A group as it stands, which is then handed out; None where it is out, or nothing of it waits."""
        if group in self._out or group not in self._open:
            return None
        self._out.add(group)
        return self._open.pop(group)
