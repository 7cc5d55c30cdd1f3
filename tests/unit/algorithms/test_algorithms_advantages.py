"""Advantages relative to the group, against numbers worked out by hand."""

from math import nan

import pytest
import torch

from physarum.actors.trainer.algorithms.advantages import (
    group_relative_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    rloo_advantages,
    stepwise_advantages,
    tournament_scores,
)
from physarum.actors.trainer.algorithms.sequences import Sequences


def test_mean_is_taken_per_group_of_unequal_size() -> None:
    # group a: 1, 0 -> mean 1/2; group b: 3, 0, 0 -> mean 1
    advantages = group_relative_advantages([1.0, 3.0, 0.0, 0.0, 0.0], ["a", "b", "a", "b", "b"], normalize_std=False)
    assert advantages.tolist() == [0.5, 2.0, -0.5, -1.0, -1.0]
    assert advantages.dtype == torch.float32


def test_standard_deviation_is_the_unbiased_one() -> None:
    # 0, 4: mean 2, variance ((-2)^2 + 2^2) / (2 - 1) = 8
    advantages = group_relative_advantages([0.0, 4.0], [7, 7], normalize_std=True)
    assert advantages.tolist() == pytest.approx([-2 / 8**0.5, 2 / 8**0.5], rel=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(normalize_std: bool) -> None:
    advantages = group_relative_advantages([0.1] * 7 + [5.0], ["same"] * 7 + ["alone"], normalize_std)
    assert advantages.tolist() == [0.0] * 8


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="reward 1 is nan"):
        group_relative_advantages([0.0, float("nan")], [0, 0], normalize_std=True)


def test_one_group_per_reward_is_demanded() -> None:
    with pytest.raises(ValueError, match="groups 1 entries"):
        group_relative_advantages(torch.zeros(2), [0], normalize_std=True)


def test_the_baseline_of_rloo_leaves_out_the_member_itself() -> None:
    # group a: 4, 1, 1: baselines 1, 2.5, 2.5; group b: a single member has none
    advantages = rloo_advantages([4.0, 1.0, 1.0, 8.0], ["a", "a", "a", "b"])
    assert advantages.tolist() == pytest.approx([3.0, -1.5, -1.5, 0.0])


def test_a_step_is_compared_with_the_same_step_of_its_siblings() -> None:
    # step 0: 1, 3 -> mean 2; step 1: only the first execution got so far; another group has its own mean
    advantages = stepwise_advantages([1.0, 5.0, 3.0, 10.0], ["g", "g", "g", "h"], [0, 1, 0, 0], normalize_std=False)
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_tournament_scores_are_means_over_the_matches_played() -> None:
    # a beat b and drew with c; b and c did not meet; d met nobody
    outcomes = torch.tensor([[9.0, 1.0, 0.5, nan], [0.0, 9.0, nan, nan], [0.5, nan, 9.0, nan], [nan, nan, nan, 9.0]])
    played = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    scores, met = tournament_scores(outcomes, played)
    assert scores.tolist() == [0.75, 0.0, 0.5, 0.0]
    assert met.tolist() == [True, True, True, False]


def test_a_tournament_that_is_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match=r"outcomes have shape \(2, 3\)"):
        tournament_scores(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


def test_reinforce_plus_plus_pays_the_reward_at_the_end_and_the_penalty_on_the_way() -> None:
    # sequence 0, gamma 0.5: rewards -0.1, (masked), 2 - 0.2: G = -0.1 + 0.9, 1.8; sequence 1: 4 - 1
    sequences = Sequences(torch.tensor([0, 0, 0, 1]), 2)
    mask = torch.tensor([True, False, True, True])
    returns = reinforce_plus_plus_returns(
        torch.tensor([2.0, 4.0]), torch.tensor([0.1, nan, 0.2, 1.0]), mask, sequences, gamma=0.5
    )
    assert returns.tolist() == pytest.approx([0.8, 0.0, 1.8, 3.0])


def test_reinforce_plus_plus_baseline_subtracts_the_groups_mean_only() -> None:
    sequences = Sequences(torch.tensor([0, 0, 1]), 2)
    mask = torch.tensor([True, False, True])
    advantages = reinforce_plus_plus_baseline_advantages([1.0, 0.0], ["g", "g"], mask, sequences)
    assert advantages.tolist() == [0.5, 0.0, -0.5]
