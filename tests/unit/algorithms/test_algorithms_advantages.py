"""Advantages relative to the group, against numbers worked out by hand."""

import pytest
import torch

from physarum.actors.trainer.algorithms.advantages import group_relative_advantages


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
