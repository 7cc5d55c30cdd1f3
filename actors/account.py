"""The account of a run: every execution that was issued is trained, masked, dropped, dead or in flight.

    issued = trained + masked + dropped + dead + in_flight + imbalance

Counted in logical executions (source, ordinal, attempt), each term from its own source: `issued` from the sources'
positions, `trained`, `masked` and `dropped` from the surviving ledger, `dead` from DEAD, `in_flight` from what lies in
TASKS, EPISODES and SAMPLES. An imbalance other than 0 is a fault of the system. Evaluation is outside the account.

Each policy that is trained has an account of its own, of the same executions: what one has trained may still be in flight
for another, or hold nothing of it (dropped: absent).

A further physical copy of an execution that has its place already is a `duplicate`: shown beside, not in the sum.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from physarum.actors import states
from physarum.actors.tools.marks import read_marks
from physarum.actors.wire import read_header
from physarum.bus import ledger, log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of, subject_of
from physarum.bus.errors import CodecError
from physarum.bus.ledger import DurableRecord, Numbered, Place, PlanRecord, RefillRecord, RollbackRecord, StepRecord
from physarum.bus.log import LogEntry, LogGapError, LogReader
from physarum.bus.names import StreamKey
from physarum.bus.records import Task
from physarum.bus.work import DeadLetter

_DUPLICATE: Final = "duplicate"
_REFUSED: Final = "refused"
_WITHDRAWN: Final = "withdrawn"
_TRIMS: Final = 5


class Logical(NamedTuple):
    """One execution that was asked for, however often it was run."""

    source: str
    ordinal: int
    attempt: int


class Issued(NamedTuple):
    """What a source has committed: first attempts, and the ledger sequence up to which it issued refills."""

    tasks: int
    refilled_through: int


_NOTHING: Final = Issued(0, 0)


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of the surviving steps: with gradient, and without because they were over the age bound."""

    trained: int
    masked: int


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """In executions. `ahead`: tasks published whose source has not committed their issue yet; counted once it has."""

    issued: int
    trained: int
    masked: int
    dropped: int
    dropped_by_reason: dict[str, int]
    dead: int
    in_flight: int
    imbalance: int
    duplicates: int
    double_trained: int
    ahead: int
    provisional_steps: int
    tokens: Tokens

    @property
    def closes(self) -> bool:
        """Nothing lost, nothing trained twice."""
        return self.imbalance == 0 and self.double_trained == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `summary.json` and `actorctl ledger --json` show them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Settled(NamedTuple):
    """A surviving step and the plan that it executed."""

    step: StepRecord
    plan: PlanRecord


def settled(records: Sequence[Numbered]) -> list[Settled]:
    """The steps that no takeover made void, in order, with their plans."""
    plans = {item.sequence: item.record for item in records if isinstance(item.record, PlanRecord)}
    return [Settled(step, plans[step.plan]) for step in ledger.surviving_steps(list(records)) if step.plan in plans]


def durable_plan(records: Iterable[Numbered]) -> int:
    """The sequence of the last plan that a checkpoint on disk covers; 0 when there is none."""
    last = 0
    for item in records:
        if isinstance(item.record, DurableRecord):
            last = max(last, item.record.last_plan)
        elif isinstance(item.record, RollbackRecord):
            last = min(last, item.record.last_plan)
    return last


def close_account(
    issued: Mapping[str, Issued | int],
    records: Sequence[Numbered],
    dead: Iterable[Logical],
    present: Iterable[Logical],
    retried: Iterable[Logical] = (),
    asked: Sequence[Numbered] | None = None,
) -> Account:
    """The account. `issued`: per source; `dead`, `present`, `retried`: physical copies, read before the ledger was.

    `retried`: dead letters that were published again. They are wherever that went; found nowhere, they are dead again.
    `asked`: the ledger that asks for refills, where it is another one.
    """
    positions = {source: one if isinstance(one, Issued) else Issued(one, 0) for source, one in issued.items()}
    refilled = _refilled(records if asked is None else asked, positions)
    done = settled(records)
    trained, masked, double = _planned(done)
    disposed = trained | masked
    dropped, duplicates = _dropped(done, disposed)
    dropped |= _withdrawn(records, disposed | dropped.keys())
    disposed |= dropped.keys()
    there = set(present)
    dead_now = set(dead)
    dead_now |= set(retried) - there - disposed
    duplicates += len(dead_now & disposed)
    dead_now -= disposed
    disposed |= dead_now
    waiting = there - disposed
    ahead = {
        one
        for one in waiting | disposed
        if (one not in refilled if one.attempt else one.ordinal >= positions.get(one.source, _NOTHING).tasks)
    }
    by_reason = Counter(reason for one, reason in dropped.items() if one not in ahead)
    places = {
        "trained": len(trained - ahead),
        "masked": len(masked - ahead),
        "dropped": by_reason.total(),
        "dead": len(dead_now - ahead),
        "in_flight": len(waiting - ahead),
    }
    total, durable = sum(one.tasks for one in positions.values()) + len(refilled), durable_plan(records)
    return Account(
        issued=total,
        **places,
        dropped_by_reason=dict(sorted(by_reason.items())),
        imbalance=total - sum(places.values()),
        duplicates=duplicates,
        double_trained=double,
        ahead=len(ahead),
        provisional_steps=sum(step.plan > durable for step, _ in done),
        tokens=Tokens(sum(step.tokens_trained for step, _ in done), sum(step.tokens_masked for step, _ in done)),
    )


async def account(bus: Bus) -> Account:
    """That of the run's own policy."""
    return (await accounts(bus))[""]


async def accounts(bus: Bus, policies: Iterable[str] = ()) -> dict[str, Account]:
    """Reads the run's streams and closes the account of its own policy ("") and of the further `policies`, also while the run
    is under way.

    The streams are read in the order in which an execution passes through them, and it is stored in the next before it
    leaves the one before: so it may be seen twice (the later place counts), but never missed.
    """
    issued = await _issued(bus)
    present = [*await _tasks(bus), *await _executions(bus, "episodes"), *await _executions(bus, "samples")]
    dead, retried = await _dead(bus)
    first = await read_ledger(bus)
    found = {"": close_account(issued, first, dead, present, retried)}
    for policy in policies:
        records = await read_ledger(bus, policy)
        found[policy] = close_account(issued, records, dead, present, retried, first)
    return found


async def read_ledger(bus: Bus, policy: str = "") -> list[Numbered]:
    """Every record that a policy's ledger holds now."""
    key = names.ledger_of(policy)
    return [ledger.decode_entry(entry) for entry in await _entries(bus, key, headers_only=False)]


def _logical(place: Place) -> Logical:
    return Logical(place.source, place.ordinal, place.attempt)


def _planned(done: Iterable[Settled]) -> tuple[set[Logical], set[Logical], int]:
    """(trained, masked, times that an execution is in a second surviving step). A refused step planned and did nothing."""
    trained: set[Logical] = set()
    masked: set[Logical] = set()
    double = 0
    for step, plan in done:
        for one in plan.executions if not step.refused else ():
            logical = _logical(one)
            double += logical in trained or logical in masked
            (trained if one.trained_tokens > 0 else masked).add(logical)
    return trained, masked - trained, double


def _dropped(done: Iterable[Settled], planned: set[Logical]) -> tuple[dict[Logical, str], int]:
    """(reason of each dropped execution that has no better place, number of duplicates)."""
    dropped: dict[Logical, str] = {}
    duplicates = 0
    for step, plan in done:
        lost = [(_logical(one), one.reason) for one in plan.dropped]
        lost += [(_logical(one), _REFUSED) for one in plan.executions] if step.refused else []
        for logical, reason in lost:
            if reason == _DUPLICATE or logical in planned or logical in dropped:
                duplicates += 1
            else:
                dropped[logical] = reason
    return dropped, duplicates


def _withdrawn(records: Sequence[Numbered], placed: set[Logical]) -> dict[Logical, str]:
    """What the withdrawn plans held; until the trainer's takeover their steps still count."""
    plans = [item.record for item in ledger.withdrawn_plans(list(records)) if isinstance(item.record, PlanRecord)]
    gone = [_logical(one) for plan in plans for one in plan.executions]
    gone += [_logical(one) for plan in plans for one in plan.dropped if one.reason != _DUPLICATE]
    return {one: _WITHDRAWN for one in gone if one not in placed}


def _refilled(records: Iterable[Numbered], positions: Mapping[str, Issued]) -> set[Logical]:
    """The refills that sources have issued."""
    return {
        Logical(item.record.source, item.record.ordinal, item.record.attempt)
        for item in records
        if isinstance(item.record, RefillRecord)
        and item.sequence <= positions.get(item.record.source, _NOTHING).refilled_through
    }


async def _issued(bus: Bus) -> dict[str, Issued]:
    """How many tasks each source has issued. Sources' names are subject tokens as they are (a-z, 0-9, -)."""
    prefix = names.subject(bus.run, "run", states.SOURCE_POSITION) + "."
    # Not a scan: one that meets a position while it is replaced would find neither the old nor the new one.
    found = [message for message in await last_of(bus, names.stream(bus.run, "run"), prefix + ">") if message.data]
    positions = {subject_of(one).removeprefix(prefix): decode(one.data, states.SourcePosition) for one in found}
    return {source: Issued(position.issued, position.refilled_through) for source, position in positions.items()}


async def _tasks(bus: Bus) -> list[Logical]:
    evaluation = names.subject(bus.run, "tasks", "eval") + "."
    entries = await log.scan(bus, "tasks")
    return [_of_task(entry.data) for entry in entries if not entry.subject.startswith(evaluation)]


async def _executions(bus: Bus, key: StreamKey) -> list[Logical]:
    training = names.subject(bus.run, key, names.training())  # of every partition
    entries = await log.scan(bus, key) if key == "episodes" else await _entries(bus, key, headers_only=True)
    return [_of_header(entry.headers) for entry in entries if entry.subject.startswith(training)]


async def _entries(bus: Bus, key: StreamKey, *, headers_only: bool) -> list[LogEntry]:
    """Every message that a log holds now (a work queue has gaps: `log.scan` reads that).

    The trainer may trim SAMPLES below a durable checkpoint while it is read: what it takes away is in the ledger.
    """
    for _ in range(_TRIMS):
        with contextlib.suppress(LogGapError):
            return await _read_log(bus, key, headers_only)
    raise LogGapError(f"{names.stream(bus.run, key)} was trimmed {_TRIMS} times while it was read; try again")


async def _read_log(bus: Bus, key: StreamKey, headers_only: bool) -> list[LogEntry]:
    state = await log.state(bus, key)
    found: list[LogEntry] = []
    if state.messages == 0:
        return found
    reader = LogReader(bus, key, state.first, headers_only=headers_only)
    async with contextlib.aclosing(reader.batches()) as batches:
        async for batch in batches:
            found += batch
            if reader.next_sequence > state.last:
                break
    return found


async def _dead(bus: Bus) -> tuple[list[Logical], list[Logical]]:
    """Training executions that were given up, and those that were dead and then retried (`actorctl dead retry`)."""
    marks = await read_marks(bus)
    given_up: list[Logical] = []
    retried: list[Logical] = []
    for entry in await log.scan(bus, "dead"):
        logical = _of_letter(bus.run, decode(entry.data, DeadLetter))
        mark = marks.get(entry.sequence)
        if logical is not None:
            (retried if mark is not None and mark.action == "retried" else given_up).append(logical)
    return given_up, retried


def _of_letter(run: str, letter: DeadLetter) -> Logical | None:
    """From the task or the header that a dead letter carries; None for evaluation, and for what is not readable as ours
    (a foreign run's, or altered): if it was ours, the imbalance shows it."""
    try:
        if letter.subject.startswith(names.subject(run, "episodes", names.training())):
            return _of_header(letter.headers)
        if letter.subject.startswith(names.subject(run, "tasks")) and ".tasks.eval." not in letter.subject:
            return _of_task(letter.body)
    except CodecError:
        return None
    return None


def _of_task(body: bytes) -> Logical:
    task = decode(body, Task)
    return Logical(task.source, task.ordinal, task.attempt)


def _of_header(headers: dict[str, str]) -> Logical:
    header = read_header(headers)
    return Logical(header.source, header.ordinal, header.attempt)
