"""Importance weights and mismatch metrics, against numbers worked out by hand."""

import math

import pytest
import torch

from physarum.actors.trainer.algorithms.corrections import (
    mismatch_metrics,
    mismatch_sums,
    truncated_importance_weights,
)


def test_weights_are_truncated_and_detached() -> None:
    train = torch.tensor([0.0, math.log(3.0), math.log(0.5)], requires_grad=True)
    weights = truncated_importance_weights(train, torch.zeros(3), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert not weights.requires_grad


def test_metrics_by_hand() -> None:
    # d = ln 2 and -ln 2: ratios 2 and 1/2
    train = torch.tensor([math.log(2.0), -math.log(2.0), math.nan])
    sums = mismatch_sums(train, torch.zeros(3), torch.tensor([True, True, False]), cap=1.5)
    metrics = mismatch_metrics({name: float(value) for name, value in sums.items()})
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["kl_k3"] == pytest.approx((1.0 - math.log(2.0) + (-0.5 + math.log(2.0))) / 2, rel=1e-6)
    assert metrics["ess"] == pytest.approx(2.5**2 / (2 * 4.25), rel=1e-6)
    assert metrics["tis_clipped_share"] == 0.5
    assert metrics["max_logprob_diff"] == pytest.approx(math.log(2.0), rel=1e-6)


def test_agreement_gives_zero_divergence_and_full_sample_size() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    sums = mismatch_sums(logprobs, logprobs, torch.ones(2, dtype=torch.bool), cap=2.0)
    metrics = mismatch_metrics({name: float(value) for name, value in sums.items()})
    expected = {"kl_k1": 0.0, "kl_k3": 0.0, "ess": 1.0, "tis_clipped_share": 0.0, "max_logprob_diff": 0.0}
    assert metrics == expected


def test_no_tokens_are_not_called_agreement() -> None:
    sums = mismatch_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), cap=2.0)
    assert math.isnan(mismatch_metrics({name: float(value) for name, value in sums.items()})["kl_k3"])
