"""Sums per sequence, placing of rewards, and whitening over the batch, against numbers worked out by hand."""

import math

import pytest
import torch

from physarum.actors.trainer.algorithms.sequences import (
    Sequences,
    SequenceSums,
    place_at_end,
    sequence_sums,
    spread,
)
from physarum.actors.trainer.algorithms.whitening import moments, whiten

TWO = Sequences(torch.tensor([0, 0, 1, 1, 1]), 3)
MASK = torch.tensor([True, True, True, False, True])


def test_sums_per_sequence_pass_over_masked_tokens_and_empty_sequences() -> None:
    # sequence 0: 1 + 2; sequence 1: 3 + 5; sequence 2 has no tokens
    sums = sequence_sums(torch.tensor([1.0, 2.0, 3.0, math.nan, 5.0]), MASK, TWO)
    assert sums.total.tolist() == [3.0, 8.0, 0.0]
    assert sums.tokens.tolist() == [2.0, 2.0, 0.0]
    assert sums.mean().tolist() == [1.5, 4.0, 0.0]


def test_sums_of_two_halves_of_a_sequence_add_up() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    left, right = torch.tensor([True, False, True, False, False]), torch.tensor([False, True, False, False, True])
    halves = [sequence_sums(values, half, TWO) for half in (left, right)]
    whole = SequenceSums(halves[0].total + halves[1].total, halves[0].tokens + halves[1].tokens)
    assert whole.mean().tolist() == sequence_sums(values, MASK, TWO).mean().tolist()


def test_a_value_per_sequence_is_spread_or_placed_on_the_last_trained_token() -> None:
    per_sequence = torch.tensor([7.0, 9.0, 11.0])
    assert spread(per_sequence, MASK, TWO).tolist() == [7.0, 7.0, 9.0, 0.0, 9.0]
    assert place_at_end(per_sequence, MASK, TWO).tolist() == [0.0, 7.0, 0.0, 0.0, 9.0]
    early = torch.tensor([True, False, True, True, False])
    assert place_at_end(per_sequence, early, TWO).tolist() == [7.0, 0.0, 0.0, 9.0, 0.0]


def test_whitening_uses_the_moments_of_both_ranks() -> None:
    # rank 0 holds 1 (and a masked 50), rank 1 holds 2 and 6: mean 3, variance (4 + 1 + 9) / 2 = 7
    first, second = torch.tensor([1.0, 50.0]), torch.tensor([2.0, 6.0])
    mask, every = torch.tensor([True, False]), torch.tensor([True, True])
    batch = moments(first, mask).joined(moments(second, every))
    assert (float(batch.mean()), float(batch.variance())) == pytest.approx((3.0, 7.0))
    assert whiten(first, mask, batch).tolist() == pytest.approx([-2 / math.sqrt(7), 0.0])
    assert whiten(second, every, batch).tolist() == pytest.approx([-1 / math.sqrt(7), 3 / math.sqrt(7)])
    assert whiten(second, every, batch, shift_mean=False).tolist() == pytest.approx([2 / 7**0.5, 6 / 7**0.5])


@pytest.mark.parametrize("values", [[0.3, 0.3, 0.3], [5.0]])
def test_whitening_of_equal_values_is_zero_and_never_nan(values: list[float]) -> None:
    tensor = torch.tensor(values)
    every = torch.ones_like(tensor, dtype=torch.bool)
    assert whiten(tensor, every, moments(tensor, every)).tolist() == pytest.approx([0.0] * len(values), abs=1e-3)


def test_whitening_of_nothing_is_nothing() -> None:
    nothing, none = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    assert whiten(nothing, none, moments(nothing, none)).tolist() == [0.0, 0.0]
