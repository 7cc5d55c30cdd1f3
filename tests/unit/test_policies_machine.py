"""Model checking of two policies over one sample log: their trainers read, plan, step, save and crash in any order.

The real planner, cursor, recovery, admission and account run over logs in memory. Every rule is one durable effect of one
trainer, so a crash may come between any two, while the other trainer is anywhere.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from physarum.actors.account import Issued, Logical, close_account, settled
from physarum.actors.own_samples import OwnSamples
from physarum.actors.source.admission import Disposals, Limit, Sizes, has_room
from physarum.actors.trainer.cursor import Cursor, CursorRecord
from physarum.actors.trainer.groups import Arrived, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.actors.trainer.recovery import recover
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import DurableRecord, LedgerRecord, Numbered, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span

SIZE = 2
POLICIES = ("policy", "solver")
BATCHES = {"policy": 1, "solver": 2}
"""Groups of each policy's batch: they do not go in step."""
BOUND = 1
EFFECTS = st.sampled_from(["read"] * 3 + ["plan"] * 2 + ["step"] * 2 + ["save", "start"])


def header(ordinal: int, owners: tuple[str, ...]) -> ExecutionHeader:
    group, member = divmod(ordinal, SIZE)
    samples = [
        SampleHeader(
            tokens=3, response=2, trainable=2, reward=float(member), status="completed",
            spans=[Span(f"{owner}@1.0", 0, 2)], span_trainable=[2],
        )
        for owner in owners
    ]  # fmt: skip
    return ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{group}/{member}", source="s", ordinal=ordinal, group=f"s/0/{group}",
        group_size=SIZE, member=member, attempt=0, tenant="", digest="", samples=samples,
    )  # fmt: skip


class Trainer:
    """One policy's: ledger, checkpoints and floor are durable, the rest is made anew by `start`."""

    def __init__(self, policy: str, log: dict[int, ExecutionHeader]) -> None:
        self.policy, self._log, self._own = policy, log, OwnSamples(policy)
        self.ledger: list[Numbered] = []
        self._saved: dict[str, CursorRecord] = {}
        self.floor, self._epoch = 1, 0
        self.start()

    def start(self) -> None:
        """Also after a crash."""
        self._epoch += 1
        found = recover(self.ledger)
        self._cursor = Cursor("log") if found.durable is None else Cursor.of(self._saved[found.durable.folder])
        self._number = found.number
        self._append(RollbackRecord(old_epoch=0, new_epoch=self._epoch, fork=self._number, last_plan=found.last_plan))
        self._replay = list(found.replay)
        disposed = {name: IntervalSet.of_intervals(one.intervals()) for name, one in self._cursor.disposed.items()}
        for place in (place for item in found.replay for place in _plan(item).places):
            disposed.setdefault(place.lineage, IntervalSet()).add(place.ordinal)
        self._planned = {place.sequence for item in found.replay for place in _plan(item).places}
        rules = PlanRules(
            groups_per_batch=BATCHES[self.policy], bound=None, normalize_std=False, objective="rl", max_sequence_tokens=9,
            groups=GroupRules(refills=0),
        )  # fmt: skip
        self._planner, self._read = Planner(rules, disposed), self._cursor.floor
        self._open: Numbered | None = None

    def read(self, trimmed_below: int) -> None:
        """The next header, if there is one; what replayed plans have consumed unread is passed over (intake.py)."""
        self._read = max(self._read, self._cursor.floor)
        if self._read > len(self._log):
            return
        assert self._read >= trimmed_below, "a sample was trimmed that this policy had not taken"
        if self._read not in self._cursor.consumed and self._read not in self._planned:
            self._planner.admit(Arrived(self._read, self._own.header(self._log[self._read])))
        self._read += 1

    def plan(self) -> None:
        """The next plan: one to be replayed, a batch, or drops that have waited for one."""
        if self._open is not None:
            return
        if self._replay:
            self._open = self._replay.pop(0)
        elif self._planner.ready or self._planner.drops_due_at is not None:
            record = self._planner.take(self._epoch, self._number, (), only_drops=not self._planner.ready).record
            self._open = Numbered(self._append(record), record)

    def step(self) -> None:
        """The plan that was recorded last is executed and recorded."""
        if self._open is None:
            return
        plan = _plan(self._open)
        self._number += bool(plan.executions)
        self._append(
            StepRecord(
                epoch=self._epoch, number=self._number, plan=self._open.sequence, changed=bool(plan.executions),
                trained=len(plan.executions), masked=0, tokens_trained=0, tokens_masked=0, ages={},
                multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=0.0,
            )
        )  # fmt: skip
        self._cursor.consume(self._open.sequence, plan)
        self._open = None

    def save(self) -> None:
        """A durable checkpoint, and the floor that it has: the only one that is kept."""
        if self._open is not None:
            return
        folder = f"{self._epoch}.{self._number}.{len(self.ledger)}"
        self._saved = {folder: self._cursor.record()}
        self.floor = self._cursor.floor
        durable = DurableRecord(
            epoch=self._epoch, number=self._number, digest="", folder=folder, floor=self.floor,
            last_plan=self._cursor.last_plan,
        )  # fmt: skip
        self._append(durable)

    def to_the_end(self, trimmed_below: int) -> None:
        """Everything that is there, left alone."""
        for _ in range(len(self._log) + 1):
            self.read(trimmed_below)
        while True:
            self.plan()
            if self._open is None:
                return
            self.step()

    def _append(self, record: LedgerRecord) -> int:
        self.ledger.append(Numbered(len(self.ledger) + 1, record))
        return len(self.ledger)


def _plan(item: Numbered) -> PlanRecord:
    assert isinstance(item.record, PlanRecord)
    return item.record


class PoliciesMachine(RuleBasedStateMachine):
    """The source issues a group while both policies have room; its executions come in any order, of either or both."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[int, ExecutionHeader] = {}
        self.trimmed_below, self.issued = 1, 0
        self.out: list[int] = []
        self.owners: dict[int, tuple[str, ...]] = {}
        self.trainers = {name: Trainer(name, self.log) for name in POLICIES}

    def _room(self, name: str) -> bool:
        done = Disposals("s")
        for item in self.trainers[name].ledger:
            done.record(item)
        batch = BATCHES[name]
        return has_room(self.issued, done.count, Sizes(SIZE, SIZE), Limit((BOUND + 1) * batch, batch))

    @rule()
    def a_group_is_issued(self) -> None:
        if all(map(self._room, POLICIES)):
            self.out += range(self.issued, self.issued + SIZE)
            self.issued += SIZE

    @rule(data=st.data(), owners=st.sampled_from([POLICIES, POLICIES[:1], POLICIES[1:], ()]))
    def an_execution_comes(self, data: st.DataObject, owners: tuple[str, ...]) -> None:
        """Of nobody: one that was cut off."""
        if self.out:
            ordinal = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.owners[ordinal] = owners
            self.log[len(self.log) + 1] = header(ordinal, owners)

    @rule(name=st.sampled_from(POLICIES), effects=st.lists(EFFECTS, min_size=1, max_size=12))
    def a_trainer_goes_on(self, name: str, effects: list[str]) -> None:
        """`start`: it died and another took over. Whoever has saved trims the log."""
        trainer = self.trainers[name]
        for effect in effects:
            if effect == "read":
                trainer.read(self.trimmed_below)
                continue
            getattr(trainer, effect)()
            if effect == "save":
                self.trimmed_below = min(one.floor for one in self.trainers.values())

    @invariant()
    def each_account_closes(self) -> None:
        waiting = [Logical("s", ordinal, 0) for ordinal in self.out]
        kept = [Logical("s", one.ordinal, 0) for number, one in self.log.items() if number >= self.trimmed_below]
        for trainer in self.trainers.values():
            made = close_account({"s": Issued(self.issued, 0)}, trainer.ledger, [], [*waiting, *kept])
            assert made.closes and made.duplicates == 0, made

    @invariant()
    def each_trains_its_own_once_and_drops_the_others_as_absent(self) -> None:
        for name, trainer in self.trainers.items():
            plans = [plan for _, plan in settled(trainer.ledger)]
            trained = [one.ordinal for plan in plans for one in plan.executions]
            assert len(trained) == len(set(trained)) and all(name in self.owners[ordinal] for ordinal in trained)
            dropped = [(one.ordinal, one.reason) for plan in plans for one in plan.dropped]
            assert all(reason == "absent" and name not in self.owners[ordinal] for ordinal, reason in dropped)

    def teardown(self) -> None:
        """Left alone, each takes all that belongs to full groups, and the source can always go on."""
        for ordinal in self.out:
            self.owners[ordinal] = POLICIES
            self.log[len(self.log) + 1] = header(ordinal, POLICIES)
        for name, trainer in self.trainers.items():
            trainer.to_the_end(self.trimmed_below)
            done = {place.ordinal for _, plan in settled(trainer.ledger) for place in plan.places}
            missing = set(range(self.issued)) - done
            assert len(missing) < SIZE * BATCHES[name], "less than a batch is left"
        assert all(map(self._room, POLICIES)), "admission is held up by nobody who has taken everything"
        self.out.clear()
        self.each_account_closes()
        self.each_trains_its_own_once_and_drops_the_others_as_absent()


PoliciesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestInAnyOrder = PoliciesMachine.TestCase
