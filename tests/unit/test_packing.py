"""Microbatch plans: exact cover, budget, balance, determinism."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.errors import SequenceTooLong
from physarum.actors.trainer.packing import plan_microbatches

LENGTHS = st.lists(st.integers(1, 64), max_size=60)


@given(LENGTHS, st.integers(64, 200), st.integers(1, 5))
def test_every_sequence_is_in_exactly_one_microbatch_within_the_budget(
    lengths: list[int], budget: int, ranks: int
) -> None:
    plan = plan_microbatches(lengths, budget, ranks)
    assert len(plan) == ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    everything = [index for microbatches in plan for microbatch in microbatches for index in microbatch]
    assert sorted(everything) == list(range(len(lengths)))
    for microbatches in plan:
        for microbatch in microbatches:
            assert sum(lengths[index] for index in microbatch) <= budget
            assert [lengths[i] for i in microbatch] == sorted((lengths[i] for i in microbatch), reverse=True)


@given(LENGTHS, st.integers(64, 200), st.integers(1, 5))
def test_ranks_differ_by_at_most_one_sequence_per_microbatch(lengths: list[int], budget: int, ranks: int) -> None:
    plan = plan_microbatches(lengths, budget, ranks)
    loads = [sum(lengths[index] for microbatch in microbatches for index in microbatch) for microbatches in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0) * len(plan[0])


@given(LENGTHS, st.integers(1, 4))
def test_the_plan_depends_on_the_lengths_only(lengths: list[int], ranks: int) -> None:
    assert plan_microbatches(lengths, 100, ranks) == plan_microbatches(tuple(lengths), 100, ranks)


def test_balance_by_hand() -> None:
    # 5 and 4 first, then 3 joins the 4, then 2 joins the 5: 7 and 7
    assert plan_microbatches([2, 3, 4, 5], 7, ranks=2) == [[[2, 1]], [[3, 0]]]


def test_one_more_microbatch_where_the_least_number_does_not_fit() -> None:
    # 12 tokens would fill two of 6, but three pieces of 4 do not fit two microbatches
    assert plan_microbatches([4, 4, 4], 6) == [[[0], [1], [2]]]


def test_fewer_sequences_than_ranks_leave_an_empty_microbatch() -> None:
    assert plan_microbatches([3], 8, ranks=2) == [[[0]], [[]]]


def test_an_overlong_sequence_is_named_for_the_caller_to_account() -> None:
    with pytest.raises(SequenceTooLong, match="sequence 1 has 9 tokens, a microbatch holds at most 8") as caught:
        plan_microbatches([8, 9], 8)
    assert (caught.value.index, caught.value.length, caught.value.budget) == (1, 9, 8)
