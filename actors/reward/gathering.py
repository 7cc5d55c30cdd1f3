"""Members of groups that wait for each other. Pure: time and messages are the caller's.

Invariant: what was added is handed out exactly once, with its whole group, or with those that came when the group is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from physarum.bus.records import Task

MemberT = TypeVar("MemberT")


@dataclass(slots=True)
class Gathered(Generic[MemberT]):
    """One group: per member's number what came, several where a task was executed twice."""

    size: int
    members: dict[int, list[MemberT]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) >= self.size

    @property
    def compared(self) -> list[MemberT]:
        """The first of each member, by its number."""
        return [self.members[number][0] for number in sorted(self.members)]

    @property
    def doubles(self) -> Iterable[tuple[int, MemberT]]:
        """Further executions of a member, with the place of the first one in `compared`."""
        for place, number in enumerate(sorted(self.members)):
            for further in self.members[number][1:]:
                yield place, further


class Gathering(Generic[MemberT]):
    """All groups that are not complete."""

    def __init__(self) -> None:
        self._open: dict[str, Gathered[MemberT]] = {}

    @property
    def waiting(self) -> int:
        """Members that were added and not handed out."""
        return sum(len(several) for group in self._open.values() for several in group.members.values())

    def add(self, task: Task, member: MemberT) -> Gathered[MemberT] | None:
        """The group, once `member` completes it; it is then handed out."""
        group = self._open.setdefault(task.group, Gathered(task.group_size))
        group.members.setdefault(task.member, []).append(member)
        return self._open.pop(task.group) if group.complete else None

    def take(self, group: str) -> Gathered[MemberT] | None:
        """An incomplete group as it stands; None where it was handed out."""
        return self._open.pop(group, None)
