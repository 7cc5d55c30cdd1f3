"""Which weights must make the tokens of the next tasks, in ordered mode: a pure fold over LEDGER.

Admission lets out one batch at a time there (age bound 0), so the number of the weights after the last surviving step is
a function of the data alone, and with it the version of every token.
"""

from __future__ import annotations

from physarum.bus.ledger import Numbered, RollbackRecord, StepRecord


class Numbers:
    """(Sequence of its plan, number of the weights after it) of each surviving step. Fed in the order of LEDGER."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []

    @property
    def current(self) -> int:
        """After the last surviving step; 0 before the first."""
        return self._steps[-1][1] if self._steps else 0

    def record(self, item: Numbered) -> None:
        record = item.record
        if isinstance(record, StepRecord):
            self._steps.append((record.plan, record.number))
        elif isinstance(record, RollbackRecord):
            self._steps = [step for step in self._steps if step[0] <= record.last_plan]
