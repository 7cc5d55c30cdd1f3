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
    WithdrawRecord,
    surviving_steps,
    withdrawn_plans,
)
from physarum.bus.version import Fork


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger says. `durable` None: from the start model, at number 0. `replay`: plans to execute verbatim;
    `withdrawn`: plans whose executions are gone, of which the checkpoint does not know; `withdrawals`: what was withdrawn, as
    (newest epoch then, last number that holds); `decisions`: closings and refills, which hold whatever became of the
    weights; `named`: every checkpoint that was ever durable, also of versions that were withdrawn."""

    durable: DurableRecord | None
    durables: list[DurableRecord]
    named: list[DurableRecord]
    replay: list[Numbered]
    withdrawn: list[Numbered]
    withdrawals: tuple[Fork, ...]
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
    durables = _surviving_durables(records)
    durable = durables[-1].record if durables else None
    since = durables[-1].sequence if durables else 0
    after = durable.last_plan if isinstance(durable, DurableRecord) else 0
    rollbacks = [item.record for item in records if isinstance(item.record, RollbackRecord)]
    withdrawals = [item for item in records if isinstance(item.record, WithdrawRecord)]
    withdrawn = withdrawn_plans(records)
    gone = {item.sequence for item in withdrawn}
    # A checkpoint that was made after a withdrawal has disposed of what was withdrawn.
    lately = any(item.sequence > since for item in withdrawals)
    return Recovery(
        durable=durable if isinstance(durable, DurableRecord) else None,
        durables=[item.record for item in durables if isinstance(item.record, DurableRecord)],
        named=[item.record for item in records if isinstance(item.record, DurableRecord)],
        replay=[
            item
            for item in records
            if isinstance(item.record, PlanRecord) and item.sequence > after and item.sequence not in gone
        ],
        withdrawn=[item for item in withdrawn if item.sequence > after] if lately else [],
        withdrawals=tuple(
            Fork(item.record.epoch, item.record.number)
            for item in withdrawals
            if isinstance(item.record, WithdrawRecord)
        ),
        decisions=[item.record for item in records if isinstance(item.record, GroupClosedRecord | RefillRecord)],
        forks=tuple(Fork(record.new_epoch, record.fork) for record in rollbacks),
        last_epoch=max((record.new_epoch for record in rollbacks), default=0),
        last_sequence=records[-1].sequence if records else 0,
        trained=sum(step.trained for step in surviving_steps(records) if step.plan <= after),
    )


def _surviving_durables(records: list[Numbered]) -> list[Numbered]:
    """Checkpoints of versions that nobody withdrew, oldest first."""
    durables: list[Numbered] = []
    for item in records:
        if isinstance(item.record, DurableRecord):
            durables.append(item)
        elif isinstance(item.record, WithdrawRecord):
            limit = item.record.last_plan
            durables = [
                one for one in durables if isinstance(one.record, DurableRecord) and one.record.last_plan <= limit
            ]
    return durables
