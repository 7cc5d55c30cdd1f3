"""The account of a run: every execution that was issued is trained, masked, dropped, dead or in flight.

    issued = trained + masked + dropped + dead + in_flight + imbalance

Counted in logical executions (source, ordinal, attempt), each term from its own source: `issued` from the sources'
positions, `trained`, `masked` and `dropped` from the surviving ledger, `dead` from DEAD, `in_flight` from what lies in
TASKS, EPISODES and SAMPLES. An imbalance other than 0 is a fault of the system. Evaluation is outside the account.

A further physical copy of an execution that has its place already is a `duplicate`: shown beside, not in the sum.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from physarum.actors import states
from physarum.actors.wire import read_header
from physarum.bus import ledger, log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import CodecError
from physarum.bus.ledger import DurableRecord, Numbered, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.log import LogEntry, LogReader
from physarum.bus.names import StreamKey
from physarum.bus.records import Task
from physarum.bus.work import DeadLetter

_DUPLICATE = "duplicate"


class Logical(NamedTuple):
    """One execution that was asked for, however often it was run."""

    source: str
    ordinal: int
    attempt: int


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


class Surviving(NamedTuple):
    """What a ledger says after its rollbacks. `plans` belong to `steps`, in the same order."""

    steps: list[StepRecord]
    plans: list[PlanRecord]
    durable_number: int


def survivors(records: Iterable[Numbered]) -> Surviving:
    """The steps that no later rollback made void: of an earlier epoch than the rollback's, and above its fork."""
    ordered = sorted(records, key=lambda item: item.sequence)
    plans = {item.sequence: item.record for item in ordered if isinstance(item.record, PlanRecord)}
    steps: list[StepRecord] = []
    durable: list[DurableRecord] = []
    for item in ordered:
        record = item.record
        if isinstance(record, StepRecord):
            steps.append(record)
        elif isinstance(record, DurableRecord):
            durable.append(record)
        elif isinstance(record, RollbackRecord):
            steps = [step for step in steps if _survives(step, record)]
            durable = [one for one in durable if _survives(one, record)]
    found = [plans[step.plan] for step in steps if step.plan in plans]
    return Surviving(steps, found, max((one.number for one in durable), default=0))


def close_account(
    issued: Mapping[str, int], records: Iterable[Numbered], dead: Iterable[Logical], present: Iterable[Logical]
) -> Account:
    """The account. `issued`: per source; `dead` and `present`: physical copies, read before the ledger was."""
    steps, plans, durable_number = survivors(records)
    trained, masked, double = _planned(plans)
    disposed = trained | masked
    dropped, duplicates = _dropped(plans, disposed)
    disposed |= dropped.keys()
    dead_now = set(dead)
    duplicates += len(dead_now & disposed)
    dead_now -= disposed
    disposed |= dead_now
    waiting = set(present) - disposed
    ahead = {one for one in waiting | disposed if one.ordinal >= issued.get(one.source, 0)}
    by_reason = Counter(reason for one, reason in dropped.items() if one not in ahead)
    places = {
        "trained": len(trained - ahead),
        "masked": len(masked - ahead),
        "dropped": by_reason.total(),
        "dead": len(dead_now - ahead),
        "in_flight": len(waiting - ahead),
    }
    total = sum(issued.values())
    return Account(
        issued=total,
        **places,
        dropped_by_reason=dict(sorted(by_reason.items())),
        imbalance=total - sum(places.values()),
        duplicates=duplicates,
        double_trained=double,
        ahead=len(ahead),
        provisional_steps=sum(step.number > durable_number for step in steps),
        tokens=Tokens(sum(step.tokens_trained for step in steps), sum(step.tokens_masked for step in steps)),
    )


async def account(bus: Bus) -> Account:
    """Reads the run's streams and closes its account, also while the run is under way.

    The streams are read in the order in which an execution passes through them, and it is stored in the next before it
    leaves the one before: so it may be seen twice (the later place counts), but never missed.
    """
    issued = await _issued(bus)
    present = [*await _tasks(bus), *await _executions(bus, "episodes"), *await _executions(bus, "samples")]
    dead = await _dead(bus)
    return close_account(issued, await read_ledger(bus), dead, present)


async def read_ledger(bus: Bus) -> list[Numbered]:
    """Every record that the ledger holds now."""
    return [ledger.decode_entry(entry) for entry in await _entries(bus, "ledger", headers_only=False)]


def _survives(record: StepRecord | DurableRecord, rollback: RollbackRecord) -> bool:
    return record.epoch >= rollback.new_epoch or record.number <= rollback.fork


def _planned(plans: Iterable[PlanRecord]) -> tuple[set[Logical], set[Logical], int]:
    """(trained, masked, times that an execution is in a second surviving step)."""
    trained: set[Logical] = set()
    masked: set[Logical] = set()
    double = 0
    for plan in plans:
        for one in plan.executions:
            logical = Logical(one.source, one.ordinal, one.attempt)
            double += logical in trained or logical in masked
            (trained if one.trained_tokens > 0 else masked).add(logical)
    return trained, masked - trained, double


def _dropped(plans: Iterable[PlanRecord], planned: set[Logical]) -> tuple[dict[Logical, str], int]:
    """(reason of each dropped execution that has no better place, number of duplicates)."""
    dropped: dict[Logical, str] = {}
    duplicates = 0
    for plan in plans:
        for one in plan.dropped:
            logical = Logical(one.source, one.ordinal, one.attempt)
            if one.reason == _DUPLICATE or logical in planned or logical in dropped:
                duplicates += 1
            else:
                dropped[logical] = one.reason
    return dropped, duplicates


async def _issued(bus: Bus) -> dict[str, int]:
    """How many tasks each source has issued. Sources' names are subject tokens as they are (a-z, 0-9, -)."""
    prefix = names.subject(bus.run, "run", states.SOURCE_POSITION) + "."
    entries = [entry for entry in await log.scan(bus, "run") if entry.subject.startswith(prefix) and entry.data]
    return {entry.subject.removeprefix(prefix): decode(entry.data, states.SourcePosition).issued for entry in entries}


async def _tasks(bus: Bus) -> list[Logical]:
    evaluation = names.subject(bus.run, "tasks", "eval") + "."
    entries = await log.scan(bus, "tasks")
    return [_of_task(entry.data) for entry in entries if not entry.subject.startswith(evaluation)]


async def _executions(bus: Bus, key: StreamKey) -> list[Logical]:
    training = names.subject(bus.run, key, "train") + "."
    entries = await log.scan(bus, key) if key == "episodes" else await _entries(bus, key, headers_only=True)
    return [_of_header(entry.headers) for entry in entries if entry.subject.startswith(training)]


async def _entries(bus: Bus, key: StreamKey, *, headers_only: bool) -> list[LogEntry]:
    """Every message that a log holds now (a work queue has gaps: `log.scan` reads that)."""
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


async def _dead(bus: Bus) -> list[Logical]:
    """Training executions that were given up, from the task or the header that each dead letter carries."""
    found: list[Logical] = []
    for entry in await log.scan(bus, "dead"):
        letter = decode(entry.data, DeadLetter)
        try:
            if letter.subject.startswith(names.subject(bus.run, "episodes", "train") + "."):
                found.append(_of_header(letter.headers))
            elif letter.subject.startswith(names.subject(bus.run, "tasks")) and ".tasks.eval." not in letter.subject:
                found.append(_of_task(letter.body))
        except CodecError:
            continue  # not readable as ours (a foreign run's, or altered): if it was ours, the imbalance shows it
    return found


def _of_task(body: bytes) -> Logical:
    task = decode(body, Task)
    return Logical(task.source, task.ordinal, task.attempt)


def _of_header(headers: dict[str, str]) -> Logical:
    header = read_header(headers)
    return Logical(header.source, header.ordinal, header.attempt)
