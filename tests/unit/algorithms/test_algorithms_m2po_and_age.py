"""M2PO's cutoff over a whole batch, bounds by age, and the alarm on growing mismatch, by hand numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.algorithms.corrections import (
    AgeDecay,
    AgeTable,
    age_weights,
    bounded_weights,
    by_age,
    exact_cutoff,
    histogram_cutoff,
    importance_weights,
    is_growing,
    log_ratio_histogram,
    log_slope,
    mismatch_by_age,
    oldest_ages,
    second_moment_mask,
    second_moments,
)
from physarum.actors.trainer.algorithms.sequences import Sequences


def test_m2po_masks_the_largest_moments_until_the_mean_fits() -> None:
    # moments 0.01, 0.04, 0.09, 1.0: means of the smallest 1, 2, 3, 4: 0.01, 0.025, 0.0467, 0.285; threshold 0.04
    train, engine = torch.tensor([0.1, -0.2, 0.3, 1.0, math.nan]), torch.zeros(5)
    mask = torch.tensor([True, True, True, True, False])
    cutoff = exact_cutoff(second_moments(train, engine, mask)[mask], 0.04)
    correction = second_moment_mask(train, engine, mask, cutoff)
    assert float(cutoff) == pytest.approx(0.04)
    assert correction.mask.tolist() == [True, True, False, False, False]
    assert float(correction.sums["m2po_rejected"]) == 2.0
    assert float(correction.sums["m2po_moment"]) == pytest.approx(0.05)


def test_equal_moments_share_one_fate() -> None:
    # 0.01, 0.09, 0.09: with both the mean is 0.0633; a single one of them is not taken
    assert float(exact_cutoff(torch.tensor([0.01, 0.09, 0.09]), 0.06)) == pytest.approx(0.01)


def test_a_batch_that_is_too_far_off_keeps_nothing_and_an_on_policy_one_all() -> None:
    far, none = torch.tensor([3.0, -3.0]), torch.zeros(2)
    every = torch.ones(2, dtype=torch.bool)
    nothing = exact_cutoff(second_moments(far, none, every), 0.04)
    assert second_moment_mask(far, none, every, nothing).mask.tolist() == [False, False]
    on_policy = histogram_cutoff(log_ratio_histogram(none, none, every), 0.04)
    assert second_moment_mask(none, none, every, on_policy).mask.tolist() == [True, True]


@given(
    st.lists(st.floats(-3.0, 3.0, width=32), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([0.001, 0.04, 0.5]),
)
def test_histograms_of_two_parts_add_up_and_never_keep_too_much(values: list[float], split: int, limit: float) -> None:
    train = torch.tensor(values)
    none, every = torch.zeros(len(values)), torch.ones(len(values), dtype=torch.bool)
    left, right = every.clone(), every.clone()
    left[split:], right[:split] = False, False
    parts = log_ratio_histogram(train, none, left) + log_ratio_histogram(train, none, right)
    whole = log_ratio_histogram(train, none, every)
    torch.testing.assert_close(parts, whole)
    cutoff = histogram_cutoff(parts, limit)
    kept = second_moment_mask(train, none, every, cutoff)
    exact = second_moment_mask(train, none, every, exact_cutoff(second_moments(train, none, every), limit))
    assert float(kept.sums["m2po_moment"]) <= limit * float(kept.mask.sum()) * (1 + 1e-9)
    assert not bool((kept.mask & ~exact.mask).any())


def test_bounds_by_age_from_a_table_and_from_a_decay() -> None:
    ages = torch.tensor([0, 1, 2, 7])
    assert by_age(AgeTable((4.0, 2.0, 1.5)), ages).tolist() == [4.0, 2.0, 1.5, 1.5]
    assert by_age(AgeDecay(base=2.0, decay=0.5), ages).tolist() == pytest.approx([2.0, 1.0, 0.5, 2 / 128])
    # a cap that closes in on 1: 1 + 3 * 0.5^age
    assert by_age(AgeDecay(3.0, 0.5, offset=1.0), ages).tolist() == pytest.approx([4.0, 2.5, 1.75, 1 + 3 / 128])


def test_the_same_ratio_is_cut_by_the_age_of_its_own_token() -> None:
    ages, every = torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool)
    weights = importance_weights(torch.full((3,), math.log(3.0)), torch.zeros(3), every)
    bound = by_age(AgeTable((4.0, 2.0, 1.0)), ages)
    assert bounded_weights(weights, every, "truncate", high=bound).weights.tolist() == pytest.approx([3.0, 2.0, 1.0])
    assert bounded_weights(weights, every, "mask", high=bound).mask.tolist() == [True, False, False]
    assert bounded_weights(weights, every, "clip", high=9.0, low=bound).weights.tolist() == pytest.approx(
        [4.0, 3.0, 3.0]
    )


def test_a_weight_of_zero_by_age_rejects_the_token() -> None:
    mask = torch.tensor([True, True, True, False])
    correction = age_weights(torch.tensor([0, 1, 5, 0]), mask, AgeTable((1.0, 0.5, 0.0)))
    assert correction.weights.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert correction.mask.tolist() == [True, True, False, False]
    assert (float(correction.sums["age_weight"]), float(correction.sums["age_rejected"])) == (1.5, 1.0)


def test_a_sequence_is_as_old_as_its_oldest_trained_token() -> None:
    sequences = Sequences(torch.tensor([0, 1, 0, 1]), 3)
    mask = torch.tensor([True, True, True, False])
    assert oldest_ages(torch.tensor([1, 2, 3, 9]), mask, sequences).tolist() == [3, 2, 3, 2]


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_a_decay_that_does_not_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        AgeDecay(1.0, decay)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        AgeTable(())


def test_mismatch_by_age_tells_age_from_engine() -> None:
    # age 0: d = 0; age 1: d = ln 2 and -ln 2; ages above 2 together
    train = torch.tensor([0.0, math.log(2.0), -math.log(2.0), 1.0, math.nan])
    mask = torch.tensor([True, True, True, True, False])
    table = mismatch_by_age(train, torch.zeros(5), mask, torch.tensor([0, 1, 1, 9, 0]), max_age=2)
    assert table[0].tolist() == [1.0, 0.0, 0.0]
    assert table[1].tolist() == pytest.approx([2.0, 0.0, 0.5], abs=1e-6)
    assert table[3].tolist() == pytest.approx([1.0, -1.0, math.e - 2.0], rel=1e-6)


def test_the_alarm_sounds_when_the_mismatch_doubles_within_the_given_steps() -> None:
    doubling_in_five = [0.001 * 2 ** (step / 5) for step in range(20)]
    assert log_slope(doubling_in_five) == pytest.approx(math.log(2.0) / 5)
    assert is_growing(doubling_in_five, window=10, doubling_steps=6.0)
    assert not is_growing(doubling_in_five, window=10, doubling_steps=4.0)
    assert not is_growing(doubling_in_five[:9], window=10, doubling_steps=6.0)
    assert not is_growing([0.01] * 10, window=10, doubling_steps=100.0)


def test_values_without_a_logarithm_are_passed_over() -> None:
    assert log_slope([1.0, 0.0, math.nan, math.e**3]) == pytest.approx(1.0)
    assert math.isnan(log_slope([0.0, 1.0]))
