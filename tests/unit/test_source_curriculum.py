"""Curricula: state from the ledger, known for every task that is out, and the two that are ready-made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from physarum.actors.source.curricula import DifficultyWindow, Stages
from physarum.actors.source.curriculum import Lessons
from physarum.actors.source.errors import StageGoneError
from physarum.actors.states import CurriculumStage, SourcePosition
from physarum.agents.protocols import Outcome
from physarum.bus.codec import decode, encode
from physarum.bus.ledger import Dropped, Numbered, Planned, PlanRecord
from physarum.configs.source import CurriculumConfig


class Counting:
    """Its state is how many groups came out; it issues the row with that number in it."""

    def __init__(self, seed: int) -> None:
        self.seen: list[Outcome] = []

    def initial(self) -> Any:
        return 0

    def observe(self, state: Any, outcomes: Sequence[Outcome]) -> Any:
        self.seen += outcomes
        return state + len(outcomes)

    def row(self, state: Any, epoch: int, index: int, row: dict[str, Any]) -> dict[str, Any] | None:
        return None if index == 3 else {**row, "prompt": state}

    def group_size(self, state: Any) -> int | None:
        return 2 + state

    def sampling(self, state: Any) -> Mapping[str, Any]:
        return {"max_new_tokens": 8 + state}


def lessons() -> Lessons:
    return Lessons(CurriculumConfig(hook=f"{__file__}:Counting"), "s", seed=0)  # type: ignore[arg-type]


def planned(index: int, ordinal: int, reward: float | None = 1.0, source: str = "s") -> Planned:
    group = f"{source}/0/{index}"
    return Planned(ordinal, f"{group}/0", source, ordinal, 0, group, 0.0, 1, 0, [], reward)


def dropped(index: int, ordinal: int, reason: str) -> Dropped:
    return Dropped(ordinal, f"s/0/{index}/1", "s", ordinal, 0, reason, 0.0)


def plan(*executions: Planned, gone: tuple[Dropped, ...] = (), number: int = 5) -> PlanRecord:
    return PlanRecord(epoch=1, at_number=number, executions=list(executions), dropped=list(gone))


def position(issued: int, **more: Any) -> SourcePosition:
    return SourcePosition(epoch=0, index=0, issued=issued, token=1, **more)


def test_the_state_is_stored_before_it_is_used_and_only_when_it_moved() -> None:
    taught = lessons()
    first = taught.advanced(position(0), oldest=0)
    assert first is not None and first.stages == [CurriculumStage(0, 0)]
    assert taught.advanced(first, 0) is None
    taught.record(Numbered(7, plan(planned(0, 0), planned(0, 1))))
    second = taught.advanced(msgspec.structs.replace(first, issued=10), 0)
    assert second is not None
    assert second.stages == [CurriculumStage(0, 0), CurriculumStage(10, 1)]
    assert second.observed_through == 7
    assert decode(encode(second), SourcePosition) == second


def test_what_is_out_keeps_the_stage_that_it_was_issued_under() -> None:
    taught = lessons()
    there = position(10, stages=[CurriculumStage(0, 0), CurriculumStage(6, 4)])
    assert [taught.group_size(there, ordinal) for ordinal in (0, 5, 6, 10)] == [2, 2, 6, 6]
    assert taught.sampling(there, 5) == {"max_new_tokens": 8}
    assert taught.row(there, 6, 0, 1, {"prompt": "x"}) == {"prompt": 4}
    assert taught.row(there, 6, 0, 3, {}) is None


def test_stages_that_no_task_needs_are_forgotten() -> None:
    taught = lessons()
    there = position(20, stages=[CurriculumStage(0, 0), CurriculumStage(6, 4), CurriculumStage(12, 5)])
    taught.record(Numbered(1, plan(planned(0, 0))))
    moved = taught.advanced(there, oldest=13)
    assert moved is not None and moved.stages == [CurriculumStage(12, 5), CurriculumStage(20, 6)]


def test_two_plans_before_the_next_task_make_one_stage() -> None:
    taught = lessons()
    there = position(4, stages=[CurriculumStage(0, 0)])
    for sequence in (1, 2):
        taught.record(Numbered(sequence, plan(planned(sequence, 0))))
    moved = taught.advanced(there, 0)
    assert moved is not None and moved.stages == [CurriculumStage(0, 0), CurriculumStage(4, 2)]


def test_a_plan_is_observed_once_also_by_a_source_that_starts_anew() -> None:
    taught = lessons()
    taught.record(Numbered(3, plan(planned(0, 0))))
    taught.record(Numbered(9, plan(planned(1, 2))))
    moved = taught.advanced(position(4, stages=[CurriculumStage(0, 1)], observed_through=3), 0)
    assert moved is not None and moved.stages[-1].state == 2


def test_outcomes_are_groups_with_what_was_dropped_and_what_it_was_issued_under() -> None:
    taught = lessons()
    record = plan(
        planned(0, 0, 1.0),
        planned(0, 1, 0.0),
        planned(9, 0, source="other"),
        planned(8, 4, None),
        gone=(dropped(1, 3, "filtered"), dropped(2, 5, "duplicate")),
    )
    taught.record(Numbered(1, record))
    taught.advanced(position(8, stages=[CurriculumStage(0, 10), CurriculumStage(2, 11)]), 0)
    assert [(one.index, one.rewards, one.state, one.number) for one in taught._hook.seen] == [  # type: ignore[attr-defined]
        (0, [1.0, 0.0], 10, 5),
        (1, [0.0], 11, 5),
    ]


def problem(level: int, seed: int) -> dict[str, Any]:
    return {"prompt": f"level {level}", "label": str(seed % 7)}


def window(**settings: Any) -> DifficultyWindow:
    return DifficultyWindow(0, environments={"sum": f"{__file__}:problem"}, groups=2, **settings)


def outcome(state: Any, index: int, reward: float, number: int = 0) -> Outcome:
    return Outcome(epoch=0, index=index, state=state, rewards=[reward], number=number)


def at_level(made: DifficultyWindow, state: Any, level: int) -> int:
    """A place that draws this level."""
    return next(index for index in range(1000) if made.row(state, 0, index, {})["metadata"]["level"] == level)


def test_a_window_moves_up_when_its_top_level_is_mastered() -> None:
    made = window(threshold=0.75, width=2)
    state = made.initial()
    assert state == {"sum": {"high": 0, "seen": 0, "right": 0.0}}
    state = made.observe(state, [outcome(state, 0, 1.0), outcome(state, 1, 0.5)])
    assert state["sum"] == {"high": 1, "seen": 0, "right": 0.0}
    levels = {made.row(state, 0, index, {})["metadata"]["level"] for index in range(50)}
    assert levels == {0, 1}
    low, high = at_level(made, state, 0), at_level(made, state, 1)
    state = made.observe(state, [outcome(state, low, 1.0), outcome(state, low, 1.0)])
    assert state["sum"]["seen"] == 0, "only the top level counts"
    state = made.observe(state, [outcome(state, high, 0.0), outcome(state, high, 1.0)])
    assert state["sum"] == {"high": 1, "seen": 0, "right": 0.0}, "half right is below the threshold: counted anew"


def test_a_place_asks_the_same_whenever_it_is_issued_under_the_same_state() -> None:
    made, state = window(), {"sum": {"high": 3, "seen": 1, "right": 1.0}}
    row = made.row(state, 2, 5, {})
    assert row == window().row(state, 2, 5, {})
    assert row["prompt"] == f"level {row['metadata']['level']}"
    assert row["metadata"]["environment"] == "sum"


def test_nothing_is_learnt_from_rows_that_were_added_at_run_time() -> None:
    """No curriculum chose them: a level that is drawn for their place would be somebody else's."""
    taught = lessons()
    first = taught.advanced(position(0), oldest=0)
    assert first is not None
    added = msgspec.structs.replace(planned(0, 1), task="s/added/3/0", group="s/added/3")
    taught.record(Numbered(7, plan(planned(0, 0), added)))
    then = taught.advanced(first, 0)
    assert then is not None and then.stages[-1].state == 1


def test_a_late_outcome_is_credited_to_the_level_that_it_was_asked_at() -> None:
    made = window(threshold=0.5, width=1)
    old = made.initial()
    new = {"sum": {"high": 2, "seen": 0, "right": 0.0}}
    assert made.observe(new, [outcome(old, 0, 1.0)]) == new


def test_stages_switch_at_a_version_and_solved_rows_are_left_out() -> None:
    made = Stages(0, stages=[{"from_version": 0}, {"from_version": 10, "group_size": 16, "max_new_tokens": 64}])
    state = made.initial()
    assert (made.group_size(state), made.sampling(state)) == (None, {})
    state = made.observe(state, [outcome(state, 4, 1.0, number=9), outcome(state, 5, 0.5, number=9)])
    assert (state["stage"], made.row(state, 1, 4, {}), made.row(state, 1, 5, {"a": 1})) == (0, None, {"a": 1})
    state = made.observe(state, [outcome(state, 6, 0.0, number=10)])
    assert (made.group_size(state), made.sampling(state)) == (16, {"max_new_tokens": 64})
    assert made.observe(state, [outcome(state, 7, 0.0, number=3)])["stage"] == 1, "a stage never goes back"


@pytest.mark.parametrize("begins", [[], [1], [0, 5, 5], [0, 3, 2]])
def test_stages_that_do_not_ascend_from_zero_are_refused(begins: list[int]) -> None:
    with pytest.raises(ValueError, match="expected ascending ones, the first 0"):
        Stages(0, stages=[{"from_version": begin} for begin in begins])


def test_a_task_whose_stage_was_forgotten_is_an_error_by_name_and_no_other_row() -> None:
    taught = lessons()
    there = position(20, stages=[CurriculumStage(6, 4), CurriculumStage(12, 5)])
    with pytest.raises(StageGoneError, match=r"ordinal 3 .*from ordinals \[6, 12\] on"):
        taught.row(there, 3, 0, 1, {})
    taught.record(Numbered(1, plan(planned(0, 3), planned(1, 7))))
    taught.advanced(there, 6)
    assert [one.index for one in taught._hook.seen] == [1]  # type: ignore[attr-defined]


def test_the_sizes_are_those_of_every_stage_that_is_still_out() -> None:
    taught = lessons()
    there = position(20, stages=[CurriculumStage(0, 30), CurriculumStage(6, 4), CurriculumStage(12, 5)])
    assert taught.group_sizes(there, 0) == [32, 6, 7]
    assert taught.group_sizes(there, 7) == [6, 7]
    assert taught.group_sizes(there, 12) == [7]
