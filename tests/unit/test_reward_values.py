"""What a hook may return, by hand-computed numbers; what it may not, by message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from physarum.actors.errors import BadHookResultError
from physarum.actors.reward.values import apply_reward
from physarum.actors.reward.worker import describe, plain
from physarum.bus.errors import CodecError
from physarum.bus.records import Execution, Sample, Task


def execution(samples: int = 2) -> Execution:
    task = Task(id="t", run="r", source="s", ordinal=0, group="g", group_size=1, member=0)
    made = [
        Sample(
            token_ids=np.arange(2, dtype=np.int32), prompt_len=1, loss_mask=np.zeros(1, np.bool_),
            logprobs=np.zeros(1, np.float32), origin="demonstration",
        )
        for _ in range(samples)
    ]  # fmt: skip
    return Execution(id="e", task=task, samples=made, worker="w", started_at=0.0, finished_at=0.0)


@pytest.mark.parametrize(
    ("value", "rewards", "parts"),
    [
        (0.5, [0.5, 0.5], [{}, {}]),
        (2, [2.0, 2.0], [{}, {}]),
        (True, [1.0, 1.0], [{}, {}]),
        ({"a": 0.25, "b": -1}, [-0.75, -0.75], [{"a": 0.25, "b": -1.0}] * 2),
        ([1.0, {"x": 0.5}], [1.0, 0.5], [{}, {"x": 0.5}]),
    ],
)
def test_numbers_parts_and_lists(value: Any, rewards: list[float], parts: list[dict[str, float]]) -> None:
    scored = execution()
    apply_reward(scored, value)
    assert [sample.reward for sample in scored.samples] == rewards
    assert [sample.reward_parts for sample in scored.samples] == parts
    assert scored.samples[0].reward_parts is not scored.samples[1].reward_parts


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "a value of type NoneType"),
        ("1.0", "a value of type str"),
        (float("inf"), "a value that is inf"),
        ({}, "an empty mapping"),
        ({"a": None}, "part 'a' of type NoneType"),
        ({1: 1.0}, "named a part 1"),
        ({"a": 1e308, "b": 1e308, "c": 1e308}, "sum of parts"),
        ([1.0], "a list of 1 entries for an execution of 2 samples"),
        ([1.0, [2.0]], "a value of type list"),
        ([1.0, float("nan")], "a value that is nan"),
    ],
)
def test_everything_else_is_refused_and_changes_nothing(value: Any, words: str) -> None:
    scored = execution()
    with pytest.raises(BadHookResultError, match=words):
        apply_reward(scored, value)
    assert [sample.reward for sample in scored.samples] == [None, None]


def test_numpy_numbers_become_plain_and_objects_are_refused() -> None:
    assert plain({"a": [np.float32(0.5), np.int64(3)], "b": (True, None)}) == {"a": [0.5, 3], "b": [True, None]}
    for value in (object(), {1: 2.0}, np.zeros(2), 1 << 63):
        with pytest.raises(CodecError, match="the reward hook returned"):
            plain(value)


def test_an_exception_is_named_with_its_place_on_one_line() -> None:
    with pytest.raises(ValueError, match="two") as caught:
        raise ValueError("two\nlines")
    assert describe(caught.value).startswith("ValueError: two lines (")
    assert "test_reward_values.py:" in describe(caught.value)


def two_turns() -> Execution:
    """[prompt | turn 0: 2 tokens | environment: 1 | turn 1: 1 token]."""
    mask = np.array([True, True, False, True])
    scored = execution(1)
    scored.samples[0] = Sample(
        token_ids=np.arange(5, dtype=np.int32), prompt_len=1, loss_mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32), origin="demonstration",
    )  # fmt: skip
    return scored


def test_a_score_per_turn_is_kept_and_its_sum_is_a_part() -> None:
    scored = two_turns()
    apply_reward(scored, {"turns": [0.25, 1], "format": 0.5}, {"format": 2.0})
    (sample,) = scored.samples
    assert sample.turns.tolist() == [0, 0, -1, 1]
    assert (sample.turn_rewards, sample.reward) == ([0.25, 1.0], 0.25 + 1.0 + 2.0 * 0.5)
    assert sample.reward_parts == {"turns": 1.25, "format": 0.5}


def test_the_weight_of_turns_holds_for_each_of_them() -> None:
    scored = two_turns()
    apply_reward(scored, {"turns": [0.25, 1], "format": 0.5}, {"turns": 2.0})
    sample = scored.samples[0]
    assert sample.reward == 3.0 and sample.turn_rewards == [0.5, 2.0], "what is given to turns is part of the reward"
    assert sample.reward_parts == {"turns": 1.25, "format": 0.5}


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([1.0], "1 scores of turns for a sample with 2 turns"),
        (1.0, "part 'turns' of type float"),
        ([1.0, float("nan")], "the score of turn 1 that is nan"),
    ],
)
def test_scores_that_do_not_fit_the_turns_change_nothing(turns: Any, words: str) -> None:
    scored = two_turns()
    with pytest.raises(BadHookResultError, match=words):
        apply_reward(scored, {"turns": turns})
    assert (scored.samples[0].reward, scored.samples[0].turn_rewards) == (None, [])


def test_a_part_weighs_what_the_configuration_says() -> None:
    scored = execution()
    apply_reward(scored, {"right": 1.0, "short": 0.5}, {"short": 0.0})
    assert scored.samples[0].reward == 1.0
    assert scored.samples[0].reward_parts == {"right": 1.0, "short": 0.5}
