"""Takeovers at any moment: a planner made anew from plans and decisions, which reads the rest again, waits for nothing
that will not come and forgets nothing that did."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import PlanRecord, RefillRecord, lineage
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span

SIZE, GROUPS, NUMBER = 2, 5, 5

Task = tuple[int, int]
"""Ordinal and attempt."""


def header(task: Task, made_by: int, tokens: int) -> ExecutionHeader:
    ordinal, attempt = task
    sample = SampleHeader(
        tokens=tokens, response=1, trainable=1, reward=0.0, status="completed", spans=[Span(f"policy@1.{made_by}", 0, 1)],
        span_trainable=[1],
    )  # fmt: skip
    group, member = divmod(ordinal, SIZE)
    return ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{group}/{member}+{attempt}", source="s", ordinal=ordinal,
        group=f"s/0/{group}", group_size=SIZE, member=member, attempt=attempt, tenant="", digest="", samples=[sample],
    )  # fmt: skip


class Run:
    """What outlives a trainer (log, letters, plans, refills), and the planner of the present one."""

    def __init__(self, consumption: str) -> None:
        self.rules = PlanRules(
            groups_per_batch=1, bound=1, normalize_std=False, objective="rl", max_sequence_tokens=100,
            groups=GroupRules(refills=1), consumption=consumption,  # type: ignore[arg-type]
        )  # fmt: skip
        self.log: list[Arrived] = []
        self.letters: list[DeadMember] = []
        self.plans: list[PlanRecord] = []
        self.refills: list[RefillRecord] = []
        self.out: list[Task] = [(ordinal, 0) for ordinal in range(SIZE * GROUPS)]
        self.planner = Planner(self.rules)

    def arrive(self, task: Task, made_by: int, tokens: int) -> None:
        self.log.append(Arrived(len(self.log) + 1, header(task, made_by, tokens)))
        self.planner.admit(self.log[-1])

    def die(self, task: Task) -> None:
        ordinal, attempt = task
        group, member = divmod(ordinal, SIZE)
        self.letters.append(DeadMember("s", ordinal, f"s/0/{group}", SIZE, member, attempt))
        self._ask(self.planner.bury(self.letters[-1]))

    def decide(self) -> None:
        for refill in self.planner.settle(NUMBER, ()):
            self._ask(refill)

    def _ask(self, refill: RefillRecord | None) -> None:
        if refill is not None:
            self.refills.append(refill)
            self.planner.apply(refill)
            self.out.append((refill.ordinal, refill.attempt))

    def step(self) -> bool:
        """A plan, if one is due; whether it was."""
        self.decide()
        ready = self.planner.ready
        if ready or self.planner.drops_due_at is not None:
            self.plans.append(self.planner.take(1, NUMBER, (), only_drops=not ready).record)
            return True
        return False

    def take_over(self, letters_first: bool) -> None:
        disposed: dict[str, IntervalSet] = {}
        gone = set()
        for plan in self.plans:
            for place in plan.places:
                disposed.setdefault(lineage(place.source, place.attempt), IntervalSet()).add(place.ordinal)
                gone.add(place.sequence)
        self.planner = Planner(self.rules, disposed)
        for refill in self.refills:
            self.planner.apply(refill)
        unread = [one for one in self.log if one.sequence not in gone]
        for one in [*self.letters, *unread] if letters_first else [*unread, *self.letters]:
            if isinstance(one, Arrived):
                self.planner.admit(one)
            else:
                self._ask(self.planner.bury(one))


@pytest.mark.parametrize("consumption", ["mask", "wait", "drop"])
@given(data=st.data())
def test_every_member_that_came_leaves_and_none_is_waited_for_in_vain(consumption: str, data: st.DataObject) -> None:
    run = Run(consumption)
    came: dict[Task, tuple[int, int]] = {}
    for _ in range(60):
        event = data.draw(st.sampled_from(["come", "come", "come", "come again", "die", "step", "take over"]))
        if event in ("come", "die") and run.out:
            task = run.out.pop(data.draw(st.integers(0, len(run.out) - 1)))
            if event == "come":
                came[task] = data.draw(st.sampled_from([(NUMBER, 10), (NUMBER, 10), (0, 10), (NUMBER, 101)]))
                run.arrive(task, *came[task])
            else:
                run.die(task)
        elif event == "come again" and came:
            task = data.draw(st.sampled_from(sorted(came)))
            run.arrive(task, *came[task])
        elif event == "take over":
            run.take_over(data.draw(st.booleans()))
        else:
            run.step()
    while run.out or run.step():
        while run.out:
            task = run.out.pop()
            came[task] = (NUMBER, 10)
            run.arrive(task, *came[task])
    run.plans.append(run.planner.take(1, NUMBER, (), only_drops=True).record)  # second copies need no plan of their own
    left = Counter(place.sequence for plan in run.plans for place in plan.places)
    assert left == Counter(one.sequence for one in run.log)
    trained = Counter(one.ordinal for plan in run.plans for one in plan.executions)
    assert set(trained.values()) <= {1}
    for ordinal in range(SIZE * GROUPS):
        young = [task for task in came if task[0] == ordinal and came[task] == (NUMBER, 10)]
        assert (ordinal in trained) >= bool(young), f"{ordinal} came as {young} and is not trained"
