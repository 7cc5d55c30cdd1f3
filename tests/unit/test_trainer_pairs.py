"""Objective "dpo": which pair of a group is planned, so that a plan that is recorded can be executed."""

from __future__ import annotations

import numpy as np

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.groups import Arrived
from physarum.actors.trainer.minibatches import pairs
from physarum.actors.trainer.plan import Plan, PlanRules
from physarum.actors.trainer.planned_advantages import preferences
from physarum.actors.trainer.planner import Planner
from physarum.bus.ledger import Mask
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span

RULES = PlanRules(groups_per_batch=1, bound=1, normalize_std=False, objective="dpo", max_sequence_tokens=100)


def sample(reward: float, tokens: int = 10, made_by: int | None = None, trainable: int = 3) -> SampleHeader:
    """Four response tokens, three of them trainable; `made_by` None: a demonstration, without spans."""
    spans = [] if made_by is None else [Span(f"policy@1.{made_by}", 0, 4)]
    return SampleHeader(
        tokens=tokens, response=4, trainable=trainable, reward=reward, status="completed", spans=spans,
        span_trainable=[trainable] * len(spans),
    )  # fmt: skip


def plan(*members: list[SampleHeader], at_number: int = 0) -> Plan:
    """Of one group with these members."""
    planner = Planner(RULES)
    for member, samples in enumerate(members):
        one = ExecutionHeader(
            execution=f"x{member}", task=f"s/0/0/{member}", source="s", ordinal=member, group="s/0/0",
            group_size=len(members), member=member, attempt=0, tenant="", digest="", samples=samples,
        )  # fmt: skip
        planner.admit(Arrived(member + 1, one))
    assert planner.ready
    return planner.take(1, at_number, ())


def signs(made: Plan) -> list[float]:
    return [one.advantage for one in made.record.executions]


def test_without_spans_the_middle_of_a_group_is_masked_all_the_same() -> None:
    made = plan([sample(0.5)], [sample(1.0)], [sample(0.0)])
    assert signs(made) == [0.0, 1.0, -1.0]
    assert [one.masks for one in made.record.executions] == [[Mask(0, 0, 4)], [], []]
    assert [(one.trained_tokens, one.masked_tokens) for one in made.record.executions] == [(0, 3), (3, 0), (3, 0)]


def test_one_that_is_over_age_is_in_no_pair() -> None:
    """At number 5 with K = 1 the best is too old: the next best is chosen."""
    made = plan([sample(1.0, made_by=3)], [sample(0.5, made_by=4)], [sample(0.0, made_by=5)], at_number=5)
    assert signs(made) == [0.0, 1.0, -1.0]
    assert made.ages == {1: 3, 0: 3}


def test_a_group_with_one_side_left_is_masked_whole() -> None:
    made = plan([sample(1.0, made_by=3)], [sample(0.0, made_by=5)], at_number=5)
    assert (signs(made), made.trained, made.masked) == ([0.0, 0.0], 0, 2)


def test_a_pair_fits_one_microbatch_together() -> None:
    """Budget 100: 60 + 60 do not fit, 60 + 40 do."""
    assert signs(plan([sample(1.0, tokens=60)], [sample(0.0, tokens=60)], [sample(0.5, tokens=40)])) == [1.0, 0.0, -1.0]
    assert plan([sample(1.0, tokens=60)], [sample(0.0, tokens=60)]).trained == 0


def test_of_pairs_that_fit_the_one_furthest_apart_is_taken() -> None:
    rewards, tokens = [3.0, 0.0, 2.9, 1.0], [70, 40, 60, 30]
    assert preferences(rewards, ["a"] * 4, tokens, 100) == [None, -1.0, 1.0, None]
    assert preferences(rewards, ["a"] * 4, [70, 40, None, 30], 100) == [1.0, None, None, -1.0]


def test_of_an_execution_with_several_samples_the_first_that_can_be_trained_is_in_the_pair() -> None:
    """The length of that one alone counts against the budget."""
    made = plan([sample(1.0, trainable=0), sample(1.0, tokens=50), sample(1.0, tokens=90)], [sample(0.0, tokens=50)])
    assert signs(made) == [1.0, -1.0]
    assert made.record.executions[0].masks == [Mask(2, 0, 4)]
    assert [one.trained_tokens for one in made.record.executions] == [3, 3]


def sequence(advantage: float, execution: int) -> TrainSequence:
    return TrainSequence(
        token_ids=np.zeros(3, np.int32), prompt_len=1, loss_mask=np.ones(2, np.bool_),
        engine_logprobs=np.zeros(2, np.float32), advantage=advantage, execution=execution, group=0,
    )  # fmt: skip


def test_a_sequence_without_a_preference_is_no_ones_worst() -> None:
    found = pairs([sequence(1.0, 0), sequence(-1.0, 1), sequence(0.0, 2)])
    assert [one.execution for one in found] == [0, 1]
