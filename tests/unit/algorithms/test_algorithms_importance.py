"""Importance weights, IcePop, OPSM, DPPO, veto and normalisation, against numbers worked out by hand."""

import math

import pytest
import torch

from physarum.actors.trainer.algorithms.corrections import (
    bounded_weights,
    combined,
    divergence_mask,
    icepop,
    identity,
    importance_weights,
    interpolated_proximal,
    normalized_weights,
    off_policy_sequence_mask,
    sequence_importance_weights,
    veto,
    veto_counts,
    weight_totals,
)
from physarum.actors.trainer.algorithms.sequences import Sequences, SequenceSums, log_ratio_sums

LN2 = math.log(2.0)
TWO = Sequences(torch.tensor([0, 0, 1, 1]), 2)
EVERY = torch.ones(4, dtype=torch.bool)
NONE = torch.zeros(4)
RATIOS = torch.tensor([4.0, 0.5, 1.0, 0.1])


def test_truncate_clip_and_mask_treat_the_same_weights_differently() -> None:
    weights = importance_weights(RATIOS.log(), NONE, EVERY)
    truncated = bounded_weights(weights, EVERY, "truncate", high=2.0, low=0.4)
    clipped = bounded_weights(weights, EVERY, "clip", high=2.0, low=0.4)
    masked = bounded_weights(weights, EVERY, "mask", high=2.0, low=0.4)
    assert truncated.weights.tolist() == pytest.approx([2.0, 0.5, 1.0, 0.1])
    assert clipped.weights.tolist() == pytest.approx([2.0, 0.5, 1.0, 0.4])
    assert masked.weights.tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0])
    assert masked.mask.tolist() == [False, True, True, False]
    assert [float(truncated.sums[f"importance_{side}"]) for side in ("low", "high")] == [0.0, 1.0]
    assert [float(clipped.sums[f"importance_{side}"]) for side in ("low", "high")] == [1.0, 1.0]
    assert float(masked.sums["importance_weight"]) == pytest.approx(1.5)


def test_rejected_tokens_leave_the_other_tokens_weight_alone() -> None:
    # five tokens with loss 1, three of them rejected, weights 1/5 counted before: the loss is 2/5 and not 1
    ratios = torch.tensor([9.0, 1.0, 9.0, 1.0, 9.0])
    mask = torch.ones(5, dtype=torch.bool)
    correction = icepop(ratios.log(), torch.zeros(5), mask)
    losses = torch.ones(5, requires_grad=True)
    total = (correction.applied(losses) * 0.2).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(0.4)
    assert losses.grad is not None and losses.grad.tolist() == pytest.approx([0.0, 0.2, 0.0, 0.2, 0.0])


def test_sequence_and_geometric_levels_by_hand() -> None:
    # sequence 0: 4 * 0.5 = 2, geometric 2^(1/2); sequence 1 without its masked token: 1
    mask = torch.tensor([True, True, True, False])
    sums = log_ratio_sums(RATIOS.log(), NONE, mask, TWO)
    product = sequence_importance_weights(sums, mask, TWO, "sequence")
    geometric = sequence_importance_weights(sums, mask, TWO, "geometric")
    assert product.tolist() == pytest.approx([2.0, 2.0, 1.0, 0.0])
    assert geometric.tolist() == pytest.approx([2**0.5, 2**0.5, 1.0, 0.0])


def test_a_long_product_of_ratios_does_not_overflow() -> None:
    sums = SequenceSums(torch.tensor([1e6, -1e6], dtype=torch.float64), torch.tensor([2.0, 2.0]))
    weights = sequence_importance_weights(sums, EVERY, TWO, "sequence")
    assert bool(torch.isfinite(weights).all())
    assert bounded_weights(weights, EVERY, "truncate", high=3.0).weights.tolist() == pytest.approx(
        [3.0, 3.0, 0.0, 0.0], abs=1e-8
    )


def test_icepop_keeps_the_weight_inside_and_drops_the_token_outside() -> None:
    correction = icepop(RATIOS.log(), NONE, EVERY, low=0.5, high=3.0)
    assert correction.weights.tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0])
    assert (float(correction.sums["icepop_low"]), float(correction.sums["icepop_high"])) == (1.0, 1.0)


def test_opsm_rejects_only_what_went_wrong_far_from_the_policy() -> None:
    # mean log(p_engine / p): sequence 0: (0.4 + 0.2) / 2 = 0.3; sequence 1: -0.1
    train = torch.tensor([-0.4, -0.2, 0.1, 0.1])
    sums = log_ratio_sums(train, NONE, EVERY, TWO)
    correction = off_policy_sequence_mask(sums, torch.tensor([-1.0, 1.0, -1.0, -1.0]), EVERY, TWO, delta=0.25)
    assert correction.mask.tolist() == [False, True, True, True]
    assert float(correction.sums["opsm_rejected"]) == 1.0


def test_dppo_rejects_only_steps_that_lead_further_out() -> None:
    # p - q: 0.3 up, 0.3 down, 0.3 up, 0.3 down; advantages +, +, -, -; a small p with ratio 5 is kept
    p, q = torch.tensor([0.5, 0.2, 0.5, 0.2, 0.005]), torch.tensor([0.2, 0.5, 0.2, 0.5, 0.001])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    correction = divergence_mask(p.log(), q.log(), advantages, torch.ones(5).bool(), low=0.2, high=0.2)
    assert correction.mask.tolist() == [False, True, True, False, True]
    assert (float(correction.sums["dppo_low"]), float(correction.sums["dppo_high"])) == (1.0, 1.0)


def test_dppo_with_the_binary_kl_by_hand() -> None:
    # q 0.5, p 0.8: 0.5 ln(0.5 / 0.8) + 0.5 ln(0.5 / 0.2) = 0.2231
    p, q, up, one = torch.tensor([0.8]).log(), torch.tensor([0.5]).log(), torch.ones(1), torch.ones(1).bool()
    assert divergence_mask(p, q, up, one, low=0.1, high=0.2232, divergence="kl").mask.tolist() == [True]
    assert divergence_mask(p, q, up, one, low=0.1, high=0.2231, divergence="kl").mask.tolist() == [False]


def test_one_impossible_token_vetoes_its_whole_sequence() -> None:
    train = torch.tensor([0.0, -12.0, 0.0, -2.0])
    counts = veto_counts(train, NONE, EVERY, TWO, threshold=1e-4)
    correction = veto(EVERY, TWO, counts)
    assert counts.tolist() == [1.0, 0.0]
    assert correction.mask.tolist() == [False, False, True, True]
    assert float(correction.sums["vetoed"]) == 2.0


def test_normalised_weights_have_mean_one_over_the_batch() -> None:
    # weights 2, 0.5, 1, 0.1: mean 0.9; per sequence: (1.25 + 0.55) / 2 = 0.9
    correction = bounded_weights(importance_weights(RATIOS.log(), NONE, EVERY), EVERY, "truncate", high=2.0)
    tokens, sequences = weight_totals(correction), weight_totals(correction, TWO)
    assert tokens.tolist() == pytest.approx([3.6, 4.0])
    assert sequences.tolist() == pytest.approx([1.8, 2.0])
    assert normalized_weights(correction, tokens).weights.mean().item() == pytest.approx(1.0)


def test_corrections_act_together_and_two_of_one_name_are_refused() -> None:
    masked = icepop(RATIOS.log(), NONE, EVERY, high=3.0)
    halved = bounded_weights(torch.full((4,), 0.5), EVERY, "truncate", high=9.0, name="age")
    both = combined(masked, halved, identity(EVERY))
    assert both.weights.tolist() == pytest.approx([0.0, 0.25, 0.5, 0.0])
    assert both.mask.tolist() == masked.mask.tolist()
    assert {"icepop_high", "age_weight"} <= both.sums.keys()
    with pytest.raises(ValueError, match="two corrections report"):
        combined(masked, masked)


def test_the_proximal_policy_lies_between_engine_and_current_by_age() -> None:
    # engine -4, current -1; age 0 and 1: the engine's; age 2: half way; age 3: two thirds of the way
    current, engine = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -4.0)
    proximal = interpolated_proximal(current, engine, torch.tensor([0, 1, 2, 3]), EVERY)
    assert proximal.tolist() == pytest.approx([-4.0, -4.0, -2.5, -2.0])
    assert not proximal.requires_grad
    two_behind = interpolated_proximal(current, engine, torch.tensor([0, 1, 2, 3]), EVERY, proximal_age=2)
    assert two_behind.tolist() == pytest.approx([-4.0, -4.0, -4.0, -3.0])
