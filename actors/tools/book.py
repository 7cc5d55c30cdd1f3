"""The ledger of a run, indexed once: which steps count, which are void, which are provisional.

Pure: everything here is a function of the ledger's records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from physarum.actors.account import Settled, durable_plan, settled
from physarum.bus import ledger
from physarum.bus.ledger import Numbered, PlanRecord, StepRecord
from physarum.bus.version import Fork, Version, effective_number


class Bound(msgspec.Struct, frozen=True):
    """A step, its plan, and whether a takeover made it void."""

    step: StepRecord
    plan: PlanRecord
    void: bool


class Book:
    """What the ledger says."""

    def __init__(self, records: Sequence[Numbered]) -> None:
        self.records = list(records)
        self.forks: tuple[Fork, ...] = ledger.forks_of(self.records)
        self.settled: list[Settled] = settled(self.records)
        self.durable = durable_plan(self.records)
        self._plans = {item.sequence: item.record for item in self.records if isinstance(item.record, PlanRecord)}
        self._executed = {step.plan for step, _ in self.settled}

    @property
    def steps(self) -> list[Bound]:
        """Every step that was ever recorded, in order; a plan that was executed again has one that is not void."""
        kept = {(step.epoch, step.plan) for step, _ in self.settled}
        found = (item.record for item in self.records if isinstance(item.record, StepRecord))
        return [Bound(step, self._plans[step.plan], (step.epoch, step.plan) not in kept) for step in found]

    def plans_under_way(self) -> Iterator[tuple[int, PlanRecord]]:
        """Plans that are recorded and whose step is not done, by sequence: the next trainer executes them verbatim."""
        return ((sequence, plan) for sequence, plan in self._plans.items() if sequence not in self._executed)

    def provisional(self, step: StepRecord) -> bool:
        """Whether no checkpoint on disk covers the step yet."""
        return step.plan > self.durable

    def age(self, label: str, at_number: int) -> int:
        """The age of a token of version `label` in a step that begins at `at_number`, by every takeover until now."""
        return at_number - effective_number(Version.parse(label), self.forks)
