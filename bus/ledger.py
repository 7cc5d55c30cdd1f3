"""The ledger: a log of what a trainer planned, did and made durable; the account is read from it. Each policy has one.

Every append names the sequence it must follow. A trainer that lost its lease is refused by that, not by its clock: the
new owner's first record (`rollback`) moves the end of the log.
"""

from __future__ import annotations

import contextlib
from typing import TypeAlias

import msgspec

from physarum.bus import log, names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.errors import LeaseLostError, StreamFullError, WrongSequenceError
from physarum.bus.log import LogEntry, LogReader
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.version import Fork


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) of sample `sample` lose their gradient because they are over the age bound."""

    sample: int
    start: int
    end: int


def lineage(source: str, attempt: int) -> str:
    """The name of the tasks of one source and attempt; ordinals are unique within it."""
    return source if attempt == 0 else f"{source}+{attempt}"


class Place(msgspec.Struct, frozen=True, array_like=True):
    """An execution that a plan disposes of: where it is in SAMPLES, and whose it is."""

    sequence: int
    task: str
    source: str
    ordinal: int
    attempt: int

    @property
    def lineage(self) -> str:
        """The source, and the attempt where it is not the first: ordinals are unique within it."""
        return lineage(self.source, self.attempt)


class Planned(Place, frozen=True, array_like=True):
    """One execution of a plan: its advantage, and what is masked of it."""

    group: str
    advantage: float
    trained_tokens: int
    masked_tokens: int
    masks: list[Mask]
    reward: float | None = None
    """As it came, before it was shaped; for whoever learns from the ledger which tasks are too easy or too hard."""


class Dropped(Place, frozen=True, array_like=True):
    """An execution that is in SAMPLES and is not trained: `reason` duplicate, late, withdrawn, too_long, ..."""

    reason: str
    reward: float | None = None


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What the step that leaves weight number `at_number` will train. Replayed verbatim after a crash."""

    epoch: int
    at_number: int
    executions: list[Planned]
    dropped: list[Dropped] = []

    @property
    def places(self) -> list[Place]:
        """Everything that leaves by this plan."""
        return [*self.executions, *self.dropped]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A plan that was executed. `number` is the weights' number after it; `changed` False: the policy is as it was, because no
    token was left, because a critic alone learned (`trained` is not 0), or because the step was refused (`refused` says why;
    its executions count as dropped(refused))."""

    epoch: int
    number: int
    plan: int
    changed: bool
    refused: str = ""
    trained: int
    masked: int
    tokens_trained: int
    tokens_masked: int
    ages: dict[int, int]
    multi_version_samples: int
    reward_mean: float | None
    wait_s: float
    started_at: float
    finished_at: float
    metrics: dict[str, float] = {}


class DurableRecord(msgspec.Struct, frozen=True, kw_only=True, tag="durable"):
    """A checkpoint is on disk: steps up to `number` are no longer provisional; SAMPLES below `floor` are not needed."""

    epoch: int
    number: int
    digest: str
    folder: str
    floor: int
    last_plan: int


class RollbackRecord(msgspec.Struct, frozen=True, kw_only=True, tag="rollback"):
    """A takeover (or the start, with old_epoch 0): training goes on from number `fork` under `new_epoch`.

    Steps recorded before it whose plan is after `last_plan` are void; those plans are executed again, verbatim.
    """

    old_epoch: int
    new_epoch: int
    fork: int
    last_plan: int = 0


class GroupClosedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="group_closed"):
    """A group goes on without `missing`, whose executions, if they still come, are dropped(late). `trained` False: what
    is there is dropped(incomplete), too. `source`, `first_ordinal`: where the group stands in the line of admission; -1 in
    records of before they were kept."""

    group: str
    size: int
    members: list[int]
    missing: list[int]
    trained: bool
    source: str = ""
    first_ordinal: int = -1

    def gone_ordinals(self) -> list[int]:
        """Of which nothing more will be trained; none where the place in line was not kept."""
        gone = self.missing if self.trained else range(self.size)
        return [self.first_ordinal + member for member in gone] if self.first_ordinal >= 0 else []


class RefillRecord(msgspec.Struct, frozen=True, kw_only=True, tag="refill"):
    """The trainer asks the source for another execution of a member that was given up, as attempt `attempt`.

    `reason`: dead (dead-lettered), or over_age, hopeless: then the earlier attempts are dropped for good, also after a
    takeover at lower weights, for which they would be young enough."""

    source: str
    ordinal: int
    group: str
    member: int
    attempt: int
    reason: str = "dead"


class WithdrawRecord(msgspec.Struct, frozen=True, kw_only=True, tag="withdraw"):
    """Somebody withdrew the versions after `number` (`actorctl weights rollback`): training goes on from that checkpoint.

    Plans after `last_plan` and before this record are never executed again: all that they hold is dropped(withdrawn), and so
    is every execution with a token of a version after `number` of `epoch` or an earlier one. Whoever writes it needs no lease:
    it moves the end of the ledger, so the trainer that is at work is refused, and its successor reads it.
    """

    epoch: int
    number: int
    last_plan: int
    reason: str


LedgerRecord: TypeAlias = (
    PlanRecord | StepRecord | DurableRecord | RollbackRecord | GroupClosedRecord | RefillRecord | WithdrawRecord
)


class Numbered(msgspec.Struct, frozen=True):
    """A ledger record and its sequence."""

    sequence: int
    record: LedgerRecord


def decode_entry(entry: LogEntry) -> Numbered:
    return Numbered(entry.sequence, decode(entry.data, LedgerRecord))  # type: ignore[arg-type]


async def read(bus: Bus, start: int = 1, key: StreamKey = "ledger") -> list[Numbered]:
    """All records from sequence `start` to the end that the ledger `key` has now."""
    last = (await log.state(bus, key)).last
    found: list[Numbered] = []
    reader = LogReader(bus, key, start)
    if last < start:
        return found
    async with contextlib.aclosing(reader.batches()) as batches:
        async for batch in batches:
            found += [decode_entry(entry) for entry in batch]
            if reader.next_sequence > last:
                break
    return found


class Ledger:
    """The trainer's pen. Only the holder of the trainer's lease may write; `epoch` is its fencing token."""

    def __init__(
        self, bus: Bus, publisher: Publisher, last_sequence: int, epoch: int, key: StreamKey = "ledger"
    ) -> None:
        self._bus, self._publisher = bus, publisher
        self._subject = names.subject(bus.run, key, "record")
        self._epoch = epoch
        self.last_sequence = last_sequence

    async def append(self, record: LedgerRecord) -> int:
        """Appends and returns the record's sequence.

        Raises LeaseLostError when somebody else has written since, StreamFullError when the ledger has no room: nothing
        ever takes records away, so waiting would not help.
        """
        expected = self.last_sequence
        try:
            ack = await self._publisher.publish(
                self._subject,
                encode(record),
                message_id=f"ledger/{self._epoch}/{expected + 1}",
                expect_last_sequence=expected,
                wait_when_full=False,
            )
        except StreamFullError as error:
            raise StreamFullError(
                f"the ledger is full after record {expected} ({error}); it keeps every plan and step of the run in its share"
                " of bus.max_store_bytes: fork the run into one with more (actorctl fork)"
            ) from error
        except WrongSequenceError as error:
            raise LeaseLostError(
                f"the ledger moved past record {expected} while epoch {self._epoch} was writing: another trainer took over."
                " This one must stop; nothing of it is lost that the new one has not taken"
            ) from error
        self.last_sequence = ack.seq
        return ack.seq


def surviving_steps(records: list[Numbered]) -> list[StepRecord]:
    """The steps that count: those no rollback made void, in order."""
    steps: list[StepRecord] = []
    for item in records:
        if isinstance(item.record, StepRecord):
            steps.append(item.record)
        elif isinstance(item.record, RollbackRecord):
            steps = [step for step in steps if step.plan <= item.record.last_plan]
    return steps


def withdrawn_plans(records: list[Numbered]) -> list[Numbered]:
    """The plans that were withdrawn, in order."""
    plans: list[Numbered] = []
    withdrawn: list[Numbered] = []
    for item in records:
        if isinstance(item.record, PlanRecord):
            plans.append(item)
        elif isinstance(item.record, WithdrawRecord):
            withdrawn += [plan for plan in plans if plan.sequence > item.record.last_plan]
            plans = [plan for plan in plans if plan.sequence <= item.record.last_plan]
    return withdrawn


def forks_of(records: list[Numbered]) -> tuple[Fork, ...]:
    """Every rollback so far, for effective version numbers."""
    return tuple(
        Fork(item.record.new_epoch, item.record.fork) for item in records if isinstance(item.record, RollbackRecord)
    )
