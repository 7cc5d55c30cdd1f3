"""Overlong penalty, reward scaling, group filters and the further reductions, against numbers worked out by hand."""

import pytest
import torch

from physarum.actors.trainer.algorithms.filters import is_informative, is_within_pass_rate
from physarum.actors.trainer.algorithms.reduction import sequence_weights
from physarum.actors.trainer.algorithms.shaping import overlong_penalty, scaled_rewards

FLAT, MIXED = [1.0, 1.0], [0.0, 1.0]


def test_the_overlong_penalty_falls_linearly_within_the_buffer() -> None:
    # limit 100, buffer 20: free up to 80; 85 -> -0.25; 100 -> -1; beyond -1
    lengths = torch.tensor([10, 80, 85, 100, 130])
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0.0, 0.0, -0.25, -1.0, -1.0])


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match="0 < buffer_tokens"):
        overlong_penalty(torch.tensor([1]), 100, buffer_tokens)


def test_rewards_are_shifted_then_scaled_then_bounded() -> None:
    assert scaled_rewards(torch.tensor([0.0, 1.0, 9.0]), scale=2.0, shift=-0.5, bound=5.0).tolist() == [-1.0, 1.0, 5.0]


def test_equal_rewards_teach_nothing() -> None:
    assert is_informative(MIXED)
    assert not is_informative(FLAT)
    assert not is_informative([0.5, 0.51], min_spread=0.02)


def test_pass_rates_at_the_bounds_are_outside() -> None:
    assert is_within_pass_rate(MIXED, 0.2, 0.8)
    assert not is_within_pass_rate(MIXED, 0.5, 0.8)


def test_further_reductions_by_hand() -> None:
    # tokens 2, 4, 0, 3 in executions 0, 0, 1, 2: three active sequences, two active executions
    tokens, executions = [2, 4, 0, 3], [0, 0, 1, 2]
    assert sequence_weights(tokens, executions, "sequence-mean") == pytest.approx([1 / 6, 1 / 12, 0.0, 1 / 9])
    assert sequence_weights(tokens, executions, "sequence-sum") == pytest.approx([1 / 3] * 4)
    assert sequence_weights(tokens, executions, "constant-length", constant_tokens=10) == pytest.approx([1 / 20] * 4)


@pytest.mark.parametrize(
    ("reduction", "constant"), [("constant-length", None), ("token-mean", 5), ("constant-length", 0)]
)
def test_a_constant_that_does_not_belong_is_refused(reduction: str, constant: int | None) -> None:
    with pytest.raises(ValueError, match="constant_tokens"):
        sequence_weights([1], [0], reduction, constant)  # type: ignore[arg-type]
