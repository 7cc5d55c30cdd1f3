"""How far the trainer has consumed the sample log, and which tasks it has disposed of: part of every checkpoint."""

from __future__ import annotations

import msgspec

from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import PlanRecord

Pairs = list[tuple[int, int]]


class CursorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The serial form. `incarnation` is the stream's creation time: a store that was made anew is noticed, not reused."""

    incarnation: str
    consumed: Pairs
    disposed: dict[str, Pairs]
    last_sequence: int
    last_plan: int


class Cursor:
    """Sequences of SAMPLES consumed by executed plans. `floor`: everything below it is consumed."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.consumed = IntervalSet()
        self.disposed: dict[str, IntervalSet] = {}
        self.last_plan = 0
        self.last_sequence = 0

    @property
    def floor(self) -> int:
        """The first sequence that is not consumed (sequences start at 1)."""
        return self.consumed.floor(1)

    def consume(self, plan_sequence: int, plan: PlanRecord) -> None:
        """Marks everything that `plan` holds as gone; called once its step is done."""
        for gone in plan.places:
            self.consumed.add(gone.sequence)
            self.disposed.setdefault(gone.lineage, IntervalSet()).add(gone.ordinal)
            self.last_sequence = max(self.last_sequence, gone.sequence)
        self.last_plan = plan_sequence

    def record(self) -> CursorRecord:
        return CursorRecord(
            incarnation=self.incarnation,
            consumed=self.consumed.intervals(),
            disposed={source: done.intervals() for source, done in self.disposed.items()},
            last_sequence=self.last_sequence,
            last_plan=self.last_plan,
        )

    @classmethod
    def of(cls, record: CursorRecord) -> Cursor:
        cursor = cls(record.incarnation)
        cursor.consumed = IntervalSet.of_intervals(record.consumed)
        cursor.disposed = {name: IntervalSet.of_intervals(pairs) for name, pairs in record.disposed.items()}
        cursor.last_sequence, cursor.last_plan = record.last_sequence, record.last_plan
        return cursor
