"""Generalised advantages and discounted returns, against numbers worked out by hand."""

from math import nan

import pytest
import torch

from physarum.actors.trainer.algorithms.advantages import (
    discounted_returns,
    discounted_turn_returns,
    generalized_advantages,
)
from physarum.actors.trainer.algorithms.sequences import Sequences

ONE = Sequences(torch.zeros(4, dtype=torch.int64), 1)


def test_tokens_of_the_environment_are_passed_over() -> None:
    # trained tokens: values 1, 2, 3, reward 4 at the end; gamma 0.5, lambda 0.5
    # delta_3 = 4 - 3 = 1;  delta_2 = 0.5 * 3 - 2 = -0.5;  delta_1 = 0.5 * 2 - 1 = 0
    # A_3 = 1;  A_2 = -0.5 + 0.25 * 1 = -0.25;  A_1 = 0 + 0.25 * -0.25 = -0.0625
    mask = torch.tensor([True, False, True, True])
    rewards, values = torch.tensor([0.0, nan, 0.0, 4.0]), torch.tensor([1.0, nan, 2.0, 3.0])
    advantages, returns = generalized_advantages(rewards, values, mask, ONE, gamma=0.5, lam=0.5)
    assert advantages.tolist() == pytest.approx([-0.0625, 0.0, -0.25, 1.0])
    assert returns.tolist() == pytest.approx([0.9375, 0.0, 1.75, 4.0])


def test_gamma_and_lambda_one_give_the_rest_of_the_rewards_minus_the_value() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    rewards, values = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([3.0, 1.0, -1.0, 0.5])
    advantages, returns = generalized_advantages(rewards, values, mask, ONE, gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([8.0, 7.0, 7.0, 5.0])
    assert advantages.tolist() == pytest.approx([5.0, 6.0, 8.0, 4.5])


def test_a_truncated_sequence_goes_on_from_its_bootstrap_value() -> None:
    # gamma 0.5, lambda 0.9; sequence 0 is one token: 1 + 0.5 * 6 - 2 = 2
    # sequence 1 ends: A_2 = 1 - 2 = -1;  A_1 = 1 + 0.5 * 2 - 2 + 0.45 * -1 = -0.45
    sequences = Sequences(torch.tensor([0, 1, 1]), 2)
    ones, twos, every = torch.ones(3), torch.full((3,), 2.0), torch.ones(3, dtype=torch.bool)
    bootstrap = torch.tensor([6.0, 0.0])
    advantages, _ = generalized_advantages(ones, twos, every, sequences, gamma=0.5, lam=0.9, bootstrap=bootstrap)
    assert advantages.tolist() == pytest.approx([2.0, -0.45, -1.0])


def test_sequences_of_unequal_length_do_not_touch_each_other() -> None:
    # [1, 2] and [8], packed in between each other; gamma 0.5
    sequences = Sequences(torch.tensor([0, 1, 0]), 3)
    returns = discounted_returns(torch.tensor([1.0, 8.0, 2.0]), torch.ones(3, dtype=torch.bool), sequences, 0.5)
    assert returns.tolist() == [2.0, 8.0, 2.0]


def test_no_trained_token_gives_no_advantage() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    advantages, returns = generalized_advantages(torch.full((4,), nan), torch.full((4,), nan), none, ONE, 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [0.0] * 4


def test_a_turn_is_worth_what_it_leads_to() -> None:
    # execution a, gamma 0.4: turn 2: 5; turn 1: 1 + 0.4 * 5 = 3; turn 0: 0 + 0.4 * 3 = 1.2; execution b: 7
    returns = discounted_turn_returns([5.0, 0.0, 7.0, 1.0], ["a", "a", "b", "a"], [2, 0, 0, 1], gamma=0.4)
    assert returns == pytest.approx([5.0, 1.2, 7.0, 3.0])


def test_a_turn_that_is_missing_discounts_all_the_same() -> None:
    # turn 0 and turn 3: gamma^3 = 0.125
    assert discounted_turn_returns([0.0, 8.0], ["a", "a"], [0, 3], gamma=0.5) == pytest.approx([1.0, 8.0])


def test_a_turn_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="turn 1 twice"):
        discounted_turn_returns([1.0, 2.0], ["a", "a"], [1, 1], gamma=1.0)
