"""Executions that leave untrained, until a plan records them.

Invariant: a drop is recorded when its group has left and not before, or once its replacement is recorded. A trainer that
starts anew knows of its predecessor's plans alone: a drop recorded earlier would look like a member that is gone, and
its group would wait for it for ever. Where nothing else is left to record, all are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from physarum.actors.trainer.groups import Arrived
from physarum.bus.ledger import Dropped, RefillRecord

LONGEST_WAIT_S: Final = 1.0
"""How long a drop waits for a batch whose plan records it, too: the source may be waiting for the room that it takes."""

_OF_GROUPS_THAT_LEFT: Final = ("duplicate", "late")


class _Waiting(msgspec.Struct, frozen=True):
    gone: Dropped
    group: str
    since: float
    replaced: bool


class Drops:
    """Drops of one planner; `awaits` says of a group whether it may still be taken. Times are monotonic seconds."""

    def __init__(self, awaits: Callable[[str], bool]) -> None:
        self._awaits = awaits
        self._waiting: list[_Waiting] = []
        self._refills: list[RefillRecord] = []
        self._held: list[_Waiting] = []

    @property
    def any(self) -> bool:
        """Whether one waits for a plan; until then the log keeps its sample."""
        return bool(self._waiting)

    @property
    def worth_a_plan(self) -> bool:
        """Whether one waits that is not a mere second copy."""
        return any(one.gone.reason != "duplicate" for one in self._waiting)

    @property
    def asks(self) -> bool:
        """Whether something is to be asked for again that `to_ask` has not returned yet."""
        return bool(self._refills)

    @property
    def vanished(self) -> int:
        """Groups that left whole, of which no plan knows yet."""
        gone = (one for one in self._waiting if one.gone.reason not in _OF_GROUPS_THAT_LEFT)
        return len({one.group for one in gone if not self._awaits(one.group)})

    @property
    def due_at(self) -> float | None:
        """When the first of those that may be recorded has waited long enough; None where none is."""
        waits = [one.since for one in self._due() if one.gone.reason != "duplicate"]
        return min(waits) + LONGEST_WAIT_S if waits else None

    def holds(self, group: str, reason: str) -> bool:
        """Whether a member of `group` that no plan has recorded yet went for `reason`."""
        return any(one.group == group and one.gone.reason == reason for one in self._waiting)

    def add(self, arrived: Arrived, reason: str, now: float) -> None:
        """Nothing comes in its place."""
        self._waiting.append(_waiting(arrived, reason, now, replaced=False))

    def replace(self, arrived: Arrived, reason: str, refill: RefillRecord, now: float) -> None:
        """No plan may record it before `refill` is recorded: after a crash nobody would ask for it again."""
        self._refills.append(refill)
        self._held.append(_waiting(arrived, reason, now, replaced=True))

    def to_ask(self) -> list[RefillRecord]:
        """What to record before the next plan; it may then name what they replace."""
        refills, self._refills = self._refills, []
        self._waiting += self._held
        self._held = []
        return refills

    def leave(self, *, alone: bool) -> list[Dropped]:
        """What the next plan records, in the order of coming. `alone`: it records nothing else, so never nothing."""
        due = [one.replaced or not self._awaits(one.group) for one in self._waiting]
        if alone and not any(due):
            due = [True] * len(due)
        leaving = [one.gone for one, leaves in zip(self._waiting, due, strict=True) if leaves]
        self._waiting = [one for one, leaves in zip(self._waiting, due, strict=True) if not leaves]
        return leaving

    def _due(self) -> list[_Waiting]:
        return [one for one in self._waiting if one.replaced or not self._awaits(one.group)]


def _waiting(arrived: Arrived, reason: str, now: float, *, replaced: bool) -> _Waiting:
    header = arrived.header
    place = (arrived.sequence, header.task, header.source, header.ordinal, header.attempt)
    return _Waiting(Dropped(*place, reason, header.reward), header.group, now, replaced)
