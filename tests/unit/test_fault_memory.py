"""What is kept per task must not grow with the tasks that are done: a hundred thousand come and go, little stays."""

from __future__ import annotations

import sys
from typing import Any

from physarum.actors.source.admission import Disposals
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.groups import Arrived
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import DurableRecord, LedgerRecord, Numbered, PlanRecord, StepRecord
from physarum.bus.records import ExecutionHeader, SampleHeader

EXECUTIONS = 100_000
GROUP = 4
RULES = PlanRules(groups_per_batch=25, bound=None, normalize_std=False, objective="sft", max_sequence_tokens=100)
STEPS = EXECUTIONS // (GROUP * RULES.groups_per_batch)


def header(ordinal: int) -> ExecutionHeader:
    group, member = divmod(ordinal, GROUP)
    sample = SampleHeader(
        tokens=5, response=4, trainable=4, reward=None, status="completed", spans=[], span_trainable=[]
    )
    return ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{group}/{member}", source="s", ordinal=ordinal, group=f"s/0/{group}",
        group_size=GROUP, member=member, attempt=0, tenant="", digest="", samples=[sample],
    )  # fmt: skip


def step(number: int, plan: int) -> StepRecord:
    return StepRecord(
        epoch=1, number=number, plan=plan, changed=True, trained=100, masked=0, tokens_trained=400, tokens_masked=0,
        ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
    )  # fmt: skip


def size_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """Of `thing` and everything that it holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    inside = (
        list(thing.items()) if isinstance(thing, dict) else list(thing) if isinstance(thing, list | tuple | set) else []
    )
    inside += [vars(thing)] if hasattr(thing, "__dict__") else []
    inside += [getattr(thing, name) for name in getattr(thing, "__struct_fields__", ())]
    return sys.getsizeof(thing) + sum(size_bytes(one, seen) for one in inside)


def test_a_hundred_thousand_executions_leave_a_planner_and_a_cursor_as_small_as_before() -> None:
    """Every second pair arrives the other way round, so that the sets have gaps on the way."""
    planner, cursor = Planner(RULES), Cursor("log")
    most = 0
    for sequence in range(1, EXECUTIONS + 1):
        planner.admit(Arrived(sequence, header((sequence - 1) ^ 1)))
        if planner.ready:
            cursor.consume(sequence, planner.take(1, 0, ()).record)
            most = max(most, size_bytes(planner) + size_bytes(cursor))
    assert cursor.disposed["s"] == IntervalSet.of_intervals([(0, EXECUTIONS)])
    assert cursor.floor == EXECUTIONS + 1
    assert most < 20_000


def test_admission_forgets_the_steps_that_a_checkpoint_covers() -> None:
    """A run of a thousand steps: what may still be voided is remembered step by step, the rest as one interval."""
    disposals, sequence, most = Disposals("s"), 0, 0
    planner = Planner(RULES)

    def record(made: LedgerRecord) -> int:
        nonlocal sequence
        sequence += 1
        disposals.record(Numbered(sequence, made))
        return sequence

    arrivals = iter(range(EXECUTIONS))
    for number in range(1, STEPS + 1):
        while not planner.ready:
            ordinal = next(arrivals)
            planner.admit(Arrived(ordinal + 1, header(ordinal)))
        made = planner.take(1, number, ()).record
        assert isinstance(made, PlanRecord)
        plan = record(made)
        record(step(number, plan))
        if number % 10 == 0:
            record(DurableRecord(epoch=1, number=number, digest="", folder="", floor=1, last_plan=plan))
            most = max(most, size_bytes(disposals))
    assert disposals.count == EXECUTIONS
    assert most < 20_000
