"""Model checking of cursor, ledger and checkpoint: a crash at any point, any number of times, changes nothing.

The real Planner, Cursor, `recover` and `surviving_steps` run over an in-memory sample log and ledger. Weights are modelled as
the tuple of all batches that made them, so "bit-equal" is equality of that tuple. Every rule is one atomic effect of the
trainer (a ledger append, a checkpoint rename, a trim); `crash` may come between any two of them.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from physarum.actors.trainer.cursor import Cursor, CursorRecord
from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.actors.trainer.recovery import Recovery, recover
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import (
    DurableRecord,
    LedgerRecord,
    Numbered,
    PlanRecord,
    RollbackRecord,
    StepRecord,
    surviving_steps,
)
from physarum.bus.records import ExecutionHeader, SampleHeader

SIZE = 2
GROUPS = 8
RULES = PlanRules(
    groups_per_batch=1,
    bound=None,
    normalize_std=False,
    objective="rl",
    max_sequence_tokens=100,
    groups=GroupRules(refills=0),
)

Batch = tuple[int, ...]
Weights = tuple[Batch, ...]


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint folder holds."""

    number: int
    weights: Weights
    cursor: CursorRecord


def header(ordinal: int) -> ExecutionHeader:
    group, member = divmod(ordinal, SIZE)
    sample = SampleHeader(
        tokens=5, response=4, trainable=4, reward=float(member), status="completed", spans=[], span_trainable=[]
    )
    return ExecutionHeader(
        execution=f"x{ordinal}",
        task=f"s/0/{group}/{member}",
        source="s",
        ordinal=ordinal,
        group=f"s/0/{group}",
        group_size=SIZE,
        member=member,
        attempt=0,
        tenant="",
        digest="",
        samples=[sample],
    )


class TrainerMachine(RuleBasedStateMachine):
    """Durable state (log, dead, ledger, folders) survives a crash; everything else is rebuilt from it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[int, ExecutionHeader] = {}
        self.trimmed_below = 1
        self.dead: list[DeadMember] = []
        self.ledger: list[Numbered] = []
        self.folders: dict[str, Checkpoint] = {}
        self.first_plan: dict[int, Batch] = {}
        self.epoch = 0
        self._start()

    # -- what a trainer does when it starts ---------------------------------------------------------------------------

    def _start(self) -> None:
        self.epoch += 1
        recovery = recover(self.ledger)
        self.cursor, self.number, self.weights = self._restore(recovery)
        self._append(
            RollbackRecord(
                old_epoch=recovery.last_epoch, new_epoch=self.epoch, fork=self.number, last_plan=recovery.last_plan
            )
        )
        self.replay = list(recovery.replay)
        self.planner = Planner(RULES, self._disposed(recovery))
        self.read = self.cursor.floor
        self.read_dead = 0
        self.open_plan: Numbered | None = None
        self.written: Checkpoint | None = None
        self.durable_folder: str | None = recovery.durable.folder if recovery.durable else None

    def _restore(self, recovery: Recovery) -> tuple[Cursor, int, Weights]:
        if recovery.durable is None:
            return Cursor("log"), 0, ()
        saved = self.folders[recovery.durable.folder]
        assert saved.number == recovery.durable.number
        return Cursor.of(saved.cursor), saved.number, saved.weights

    def _disposed(self, recovery: Recovery) -> dict[str, IntervalSet]:
        disposed = {name: IntervalSet.of_intervals(done.intervals()) for name, done in self.cursor.disposed.items()}
        for item in recovery.replay:
            assert isinstance(item.record, PlanRecord)
            for place in item.record.places:
                disposed.setdefault(place.lineage, IntervalSet()).add(place.ordinal)
        return disposed

    def _append(self, record: LedgerRecord) -> int:
        self.ledger.append(Numbered(len(self.ledger) + 1, record))
        return len(self.ledger)

    # -- what happens, one effect at a time ---------------------------------------------------------------------------

    @rule(ordinal=st.integers(0, SIZE * GROUPS - 1))
    def an_execution_is_stored(self, ordinal: int) -> None:
        """Also a second time, as after a redelivery."""
        if all(member.ordinal != ordinal for member in self.dead):
            self.log[len(self.log) + 1] = header(ordinal)

    @rule(ordinal=st.integers(0, SIZE * GROUPS - 1))
    def a_task_is_dead_lettered(self, ordinal: int) -> None:
        if all(one.ordinal != ordinal for one in self.log.values()) and all(d.ordinal != ordinal for d in self.dead):
            group, member = divmod(ordinal, SIZE)
            self.dead.append(DeadMember("s", ordinal, f"s/0/{group}", SIZE, member, 0))

    @precondition(lambda self: self.read <= len(self.log))
    @rule()
    def a_header_is_read(self) -> None:
        replayed = {place.sequence for item in self.replay for place in item.record.places}
        if self.open_plan is not None:
            replayed |= {place.sequence for place in self.open_plan.record.places}
        assert self.read >= self.trimmed_below, "the trainer needs a sample that was trimmed"
        if self.read not in self.cursor.consumed and self.read not in replayed:
            self.planner.admit(Arrived(self.read, self.log[self.read]))
        self.read += 1

    @precondition(lambda self: self.read_dead < len(self.dead))
    @rule()
    def a_dead_letter_is_read(self) -> None:
        assert self.planner.bury(self.dead[self.read_dead]) is None
        self.read_dead += 1

    @precondition(lambda self: self.open_plan is None and (self.replay or self.planner.ready))
    @rule()
    def a_plan_is_recorded_or_replayed(self) -> None:
        if self.replay:
            self.open_plan = self.replay.pop(0)
            return
        record = self.planner.take(self.epoch, self.number, ()).record
        self.open_plan = Numbered(self._append(record), record)

    @precondition(lambda self: self.open_plan is not None)
    @rule()
    def the_plan_is_trained_and_recorded(self) -> None:
        assert self.open_plan is not None
        plan = self.open_plan.record
        assert isinstance(plan, PlanRecord)
        batch = tuple(item.sequence for item in plan.executions)
        assert self.first_plan.setdefault(self.open_plan.sequence, batch) == batch, "a plan was not replayed verbatim"
        self.weights = (*self.weights, batch)
        self.number += 1
        self._append(
            StepRecord(
                epoch=self.epoch,
                number=self.number,
                plan=self.open_plan.sequence,
                changed=True,
                trained=len(batch),
                masked=0,
                tokens_trained=0,
                tokens_masked=0,
                ages={},
                multi_version_samples=0,
                reward_mean=None,
                wait_s=0.0,
                started_at=0.0,
                finished_at=0.0,
            )
        )
        self.cursor.consume(self.open_plan.sequence, plan)
        self.open_plan = None

    @precondition(lambda self: self.open_plan is None and self.written is None)
    @rule()
    def a_checkpoint_is_renamed_into_place(self) -> None:
        self.written = Checkpoint(self.number, self.weights, self.cursor.record())
        self.folders[f"{self.epoch}.{self.number}"] = self.written

    @precondition(lambda self: self.written is not None and self.open_plan is None)
    @rule()
    def the_checkpoint_is_recorded_as_durable(self) -> None:
        assert self.written is not None
        folder = f"{self.epoch}.{self.written.number}"
        cursor = Cursor.of(self.written.cursor)
        self._append(
            DurableRecord(
                epoch=self.epoch,
                number=self.written.number,
                digest="",
                folder=folder,
                floor=cursor.floor,
                last_plan=cursor.last_plan,
            )
        )
        self.durable_folder, self.written = folder, None

    @precondition(lambda self: self.durable_folder is not None and self.written is None)
    @rule()
    def older_checkpoints_and_samples_below_the_floor_are_removed(self) -> None:
        kept = self.durable_folder
        assert kept is not None
        self.folders = {name: saved for name, saved in self.folders.items() if name == kept}
        self.trimmed_below = max(self.trimmed_below, Cursor.of(self.folders[kept].cursor).floor)

    @rule()
    def crash(self) -> None:
        self._start()

    # -- what must always hold ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        plans = {item.sequence: item.record for item in self.ledger if isinstance(item.record, PlanRecord)}
        trained = [item.ordinal for step in surviving_steps(self.ledger) for item in plans[step.plan].executions]
        assert len(trained) == len(set(trained))

    @invariant()
    def the_weights_are_those_of_the_surviving_steps_in_order(self) -> None:
        plans = {item.sequence: item.record for item in self.ledger if isinstance(item.record, PlanRecord)}
        batches = tuple(
            tuple(item.sequence for item in plans[step.plan].executions) for step in surviving_steps(self.ledger)
        )
        assert self.weights == batches
        assert self.number == len(batches)

    def teardown(self) -> None:
        """Left alone, the trainer takes every group that is complete: nothing was lost on the way."""
        while self.read <= len(self.log):
            self.a_header_is_read()
        while self.read_dead < len(self.dead):
            self.a_dead_letter_is_read()
        while self.open_plan is not None or self.replay or self.planner.ready:
            if self.open_plan is None:
                self.a_plan_is_recorded_or_replayed()
            self.the_plan_is_trained_and_recorded()
        stored = {one.ordinal for one in self.log.values()}
        gone = {one.ordinal for one in self.dead}
        complete = {
            ordinal
            for ordinal in stored
            if all(
                sibling in stored | gone for sibling in range(ordinal - ordinal % SIZE, ordinal - ordinal % SIZE + SIZE)
            )
        }
        plans = {item.sequence: item.record for item in self.ledger if isinstance(item.record, PlanRecord)}
        trained = {item.ordinal for step in surviving_steps(self.ledger) for item in plans[step.plan].executions}
        assert trained == complete


TrainerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestEveryCrashPoint = TrainerMachine.TestCase
