"""Where a trainer begins: the last durable checkpoint that the ledger names, and the plans recorded after it."""

from __future__ import annotations

import msgspec

from physarum.bus.ledger import (
    DurableRecord,
    GroupClosedRecord,
    Numbered,
    PlanRecord,
    RefillRecord,
    RollbackRecord,
    surviving_steps,
)
from physarum.bus.version import Fork


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says. `durable` None: from the start model, at number 0. `replay`: plans to execute verbatim;
    `decisions`: closings and refills, which hold whatever became of the weights."""

    durable: DurableRecord | None
    durables: list[DurableRecord]
    replay: list[Numbered]
    decisions: list[GroupClosedRecord | RefillRecord]
    forks: tuple[Fork, ...]
    last_epoch: int
    last_sequence: int
    trained: int
    """Executions trained by the steps that the checkpoint holds."""

    @property
    def refills(self) -> int:
        """Replacements of dead members that were asked for so far."""
        return sum(isinstance(decided, RefillRecord) for decided in self.decisions)

    @property
    def number(self) -> int:
        return self.durable.number if self.durable is not None else 0

    @property
    def last_plan(self) -> int:
        return self.durable.last_plan if self.durable is not None else 0


def recover(records: list[Numbered]) -> Recovery:
    """Pure: the same ledger always gives the same beginning."""
    durables = [item.record for item in records if isinstance(item.record, DurableRecord)]
    durable = durables[-1] if durables else None
    after = durable.last_plan if durable is not None else 0
    rollbacks = [item.record for item in records if isinstance(item.record, RollbackRecord)]
    return Recovery(
        durable=durable,
        durables=durables,
        replay=[item for item in records if isinstance(item.record, PlanRecord) and item.sequence > after],
        decisions=[item.record for item in records if isinstance(item.record, GroupClosedRecord | RefillRecord)],
        forks=tuple(Fork(record.new_epoch, record.fork) for record in rollbacks),
        last_epoch=max((record.new_epoch for record in rollbacks), default=0),
        last_sequence=records[-1].sequence if records else 0,
        trained=sum(step.trained for step in surviving_steps(records) if step.plan <= after),
    )
