"""Groups on their way to completeness: members that came, members that will not, refills and closing.

Pure; time comes from the caller. What depends on time or on deaths (closing, refilling) is first recorded in LEDGER by the
caller and then applied here, so that a trainer that starts anew comes to the same groups.
"""

from __future__ import annotations

import msgspec

from physarum.bus.ledger import GroupClosedRecord, RefillRecord
from physarum.bus.records import ExecutionHeader


class Arrived(msgspec.Struct, frozen=True):
    """An execution as the log has it."""

    sequence: int
    header: ExecutionHeader


class DeadMember(msgspec.Struct, frozen=True):
    """A task that was dead-lettered. `final`: another attempt would end the same."""

    source: str
    ordinal: int
    group: str
    group_size: int
    member: int
    attempt: int
    final: bool = False


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """As in `configs.groups`."""

    enough: int | None = None
    deadline_s: float | None = None
    refills: int = 0
    min_members: int = 1
    drop_incomplete: bool = True


class Group(msgspec.Struct):
    """Members by index. `given_up`: will not come, or only too late; `first_at`: when the first one came, or the last
    one was asked for again; `compared`: who were given their rewards together (nobody: each its own), `answered`: those of
    them that came, whatever became of them."""

    name: str
    size: int
    first_at: float
    members: dict[int, Arrived] = {}
    given_up: set[int] = set()
    compared: frozenset[int] = frozenset()
    answered: set[int] = set()

    @property
    def closed(self) -> bool:
        return len(self.members.keys() | self.given_up) >= self.size

    @property
    def arrived(self) -> list[Arrived]:
        """What came, by member."""
        return [self.members[member] for member in sorted(self.members)]

    @property
    def source(self) -> str:
        """Whose it is. Call only where a member came."""
        return next(iter(self.members.values())).header.source

    @property
    def first_ordinal(self) -> int:
        """Of the group's first member, whether that came or not. Call only where one came."""
        return first_ordinal(next(iter(self.members.values())).header)


class Groups:
    """All open groups, and those that are complete, in the order in which they became so, until they are taken."""

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._open: dict[str, Group] = {}
        self._complete: dict[str, Group] = {}
        self._closings: dict[str, GroupClosedRecord] = {}
        self._gone: dict[str, set[int]] = {}
        self._asked: dict[tuple[str, int], RefillRecord] = {}
        self._comparing = False

    @property
    def complete(self) -> int:
        """Groups that may be taken."""
        return len(self._complete)

    @property
    def waiting(self) -> int:
        """Executions that wait for their group, or for a plan."""
        return sum(len(group.members) for group in (*self._open.values(), *self._complete.values()))

    def take(self, name: str) -> Group:
        """A complete group by name; it is known here no longer."""
        group = self._complete.pop(name)
        for member in group.members:
            self._asked.pop((name, member), None)
        return group

    def completed(self) -> list[Group]:
        """Groups that may be taken, in the order in which they became complete."""
        return list(self._complete.values())

    def awaits(self, name: str) -> bool:
        """Whether the group is known and may still be taken."""
        return name in self._open or name in self._complete

    def is_over(self, name: str) -> bool:
        """Whether the group was closed here without a member of its own, and is known no longer: nothing of it will come."""
        return name in self._gone and not self.awaits(name)

    def admit(self, arrived: Arrived, now: float) -> str | None:
        """Takes an execution; returns why it is not taken (late, incomplete, duplicate), or None."""
        header = arrived.header
        refused = self.refusal(header)
        if refused is None:
            group = self._group(header.group, header.group_size, now)
            group.members[header.member] = arrived
            self._note(group)
        return refused

    def refusal(self, header: ExecutionHeader) -> str | None:
        """Why an execution has no place in its group (late, incomplete, duplicate); None when it has one."""
        closing = self._closings.get(header.group)
        if self._went_on_without(header.group, header.member):
            return "late"
        if closing is not None and not closing.trained:
            return "incomplete"
        group = self._complete.get(header.group) or self._open.get(header.group)
        if group is None:
            return None
        if header.member in group.given_up:
            return "late"
        present = group.members.get(header.member)
        if present is None:
            return None
        return "duplicate" if present.header.attempt == header.attempt else "late"

    def answered(self, header: ExecutionHeader, now: float) -> None:
        """A member came whose reward was given together with others': the group goes on with these (then it is `overdue`)."""
        if header.compared:
            self._comparing = True
            group = self._group(header.group, header.group_size, now)
            group.compared = group.compared or frozenset(header.compared)
            group.answered.add(header.member)

    def is_apart(self, header: ExecutionHeader) -> bool:
        """Whether its reward says nothing against those of its group: it came after they were given, or was given its own in
        another comparison."""
        if header.compared is None:
            return False
        group = self._open.get(header.group)
        return not header.compared or (
            group is not None and bool(group.compared) and group.compared != frozenset(header.compared)
        )

    def bury(self, dead: DeadMember, now: float) -> RefillRecord | None:
        """A member's task is dead: the refill to record (then call `asked`), or None, and it is given up."""
        if self._asked_after(dead.group, dead.member, dead.attempt):
            return None  # its successor is on its way
        if self._went_on_without(dead.group, dead.member):
            return None  # a refill would only be late
        group = self._open.get(dead.group)
        refill = None if group is not None and group.compared else self._refill(dead, "dead")
        if refill is None:
            self.give_up(dead.group, dead.group_size, dead.member, now)
        return refill

    def expel(self, arrived: Arrived, reason: str, now: float) -> RefillRecord | None:
        """Takes an execution out of its group, of which it may have been part; as `bury` for what follows.

        The group is open again until the refill comes; without one it goes on with those that are left."""
        header = arrived.header
        name, member = header.group, header.member
        lost = DeadMember(header.source, header.ordinal, name, header.group_size, member, header.attempt)
        group = self._complete.pop(name, None) or self._group(name, header.group_size, now)
        group.first_at = now
        self._open[name] = group
        self._gone.pop(name, None)
        if group.members.get(member) == arrived:
            del group.members[member]
        refill = None
        if not self._asked_after(name, member, header.attempt):
            refill = None if group.compared else self._refill(lost, reason)  # which would be compared with nobody
            if refill is None:
                group.given_up.add(member)
        self._note(group)
        return refill

    def successor(self, name: str, member: int) -> RefillRecord | None:
        """What was asked for because the attempts before it were dropped for their age: those are never trained."""
        asked = self._asked.get((name, member))
        return None if asked is None or asked.reason == "dead" else asked

    def _refill(self, lost: DeadMember, reason: str) -> RefillRecord | None:
        if lost.final or lost.attempt >= self._rules.refills:
            return None
        return RefillRecord(
            source=lost.source,
            ordinal=lost.ordinal,
            group=lost.group,
            member=lost.member,
            attempt=lost.attempt + 1,
            reason=reason,
        )

    def _asked_after(self, name: str, member: int, attempt: int) -> bool:
        asked = self._asked.get((name, member))
        return asked is not None and asked.attempt > attempt

    def _went_on_without(self, name: str, member: int) -> bool:
        """Whether the group was closed, and this member was not there."""
        closing = self._closings.get(name)
        return member in self._gone.get(name, ()) or (closing is not None and member in closing.missing)

    def asked(self, record: RefillRecord) -> None:
        """A refill was recorded in LEDGER."""
        self._asked[record.group, record.member] = record

    def give_up(self, name: str, size: int, member: int, now: float) -> None:
        """A member will not come: its group closes without it."""
        if name in self._complete or member in self._gone.get(name, ()):
            return
        group = self._group(name, size, now)
        if member not in group.members:
            group.given_up.add(member)
            self._note(group)

    def revive(self, dead: DeadMember, now: float) -> None:
        """A dead member was sent on its way again: its group waits for it, unless it has gone on without it.

        A group all of whose members were given up is open again: nothing of it was trained.
        """
        gone = self._gone.get(dead.group, set())
        if dead.group not in self._open and len(gone) == dead.group_size:
            self._open[dead.group] = Group(dead.group, dead.group_size, now, given_up=self._gone.pop(dead.group))
        if dead.group in self._open:
            self._open[dead.group].given_up.discard(dead.member)

    def rest(self) -> list[GroupClosedRecord]:
        """What to record of the open groups when nothing more will come; then `close` each."""
        return [self._closing(group) for group in self._open.values() if group.members]

    def oldest(self) -> GroupClosedRecord | None:
        """What to record of the open group that came first into the log, to go on without its missing; then `close` it."""
        waiting = [group for group in self._open.values() if group.members]
        return self._closing(min(waiting, key=_first_sequence)) if waiting else None

    def next_deadline(self) -> float | None:
        """When the next open group is overdue; None where there is no deadline or nothing waits."""
        if self._rules.deadline_s is None:
            return None
        started = [group.first_at for group in self._open.values() if group.members]
        return min(started) + self._rules.deadline_s if started else None

    def overdue(self, now: float) -> list[GroupClosedRecord]:
        """What to record of the groups whose deadline has passed, or that have enough members; then `close` each."""
        if self._rules.enough is None and self._rules.deadline_s is None and not self._comparing:
            return []
        started = [group for group in self._open.values() if group.members]
        return [self._closing(group) for group in started if self._is_due(group, now)]

    def _is_due(self, group: Group, now: float) -> bool:
        if self._rules.deadline_s is not None and now - group.first_at >= self._rules.deadline_s:
            return True
        if group.compared:
            return group.compared <= group.answered | group.given_up
        return len(group.members) >= (self._rules.enough or group.size)

    def close(self, record: GroupClosedRecord) -> list[Arrived]:
        """Applies a recorded closing (also of a group that has yet to be read again); returns what it drops."""
        self._closings[record.group] = record
        group = self._open.get(record.group)
        if group is None:
            return []
        group.given_up.update(record.missing)
        if record.trained:
            self._note(group)
            return []
        del self._open[record.group]
        return list(group.members.values())

    def _closing(self, group: Group) -> GroupClosedRecord:
        return GroupClosedRecord(
            group=group.name,
            size=group.size,
            members=sorted(group.members),
            missing=sorted(set(range(group.size)) - group.members.keys()),
            trained=len(group.members) >= self._rules.min_members or not self._rules.drop_incomplete,
            source=group.source,
            first_ordinal=group.first_ordinal,
        )

    def _group(self, name: str, size: int, now: float) -> Group:
        if name not in self._open:
            closing = self._closings.get(name)
            self._open[name] = Group(name, size, now, given_up=set(closing.missing) if closing else set())
        return self._open[name]

    def _note(self, group: Group) -> None:
        if not group.closed:
            return
        del self._open[group.name]
        if group.given_up:
            self._gone[group.name] = group.given_up
        if group.members:
            self._complete[group.name] = group


def first_ordinal(header: ExecutionHeader) -> int:
    """The ordinal of the first member of an execution's group."""
    return header.ordinal - header.member


def _first_sequence(group: Group) -> int:
    return min(arrived.sequence for arrived in group.members.values())
