"""Clipped policy loss and cross entropy, against numbers worked out by hand."""

import math

import pytest
import torch

from physarum.actors.trainer.algorithms.losses import policy_loss, sft_loss


def test_clip_higher_cuts_each_side_at_its_own_bound() -> None:
    # ratios 2, 0.5, 1.25, 2, 0.5 with advantages 1, 1, 1, -1, -1; clip to [0.8, 1.28]
    ratios = torch.tensor([2.0, 0.5, 1.25, 2.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    loss, sums = policy_loss(ratios.log(), torch.zeros(5), advantages, torch.ones(5, dtype=torch.bool), 0.2, 0.28)
    # min(2, 1.28) = 1.28; min(.5, .8) = .5; 1.25 inside; min(-2, -1.28) = -2; min(-.5, -.8) = -.8
    assert loss.tolist() == pytest.approx([-1.28, -0.5, -1.25, 2.0, 0.8], rel=1e-6)
    assert int(sums["clipped"]) == 2
    assert float(sums["ratio"]) == pytest.approx(6.25)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    loss, sums = policy_loss(logprobs, logprobs, torch.tensor([3.0, -0.5]), mask, 0.2, 0.28)
    loss.sum().backward()
    assert loss.tolist() == [-3.0, 0.5]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-3.0, 0.5]
    assert int(sums["clipped"]) == 0


def test_clipped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([math.log(2.0)], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1), torch.ones(1), torch.ones(1, dtype=torch.bool), 0.2, 0.28)
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_masked_positions_poison_neither_value_nor_gradient(poison: float) -> None:
    logprobs = torch.tensor([-1.0, poison], requires_grad=True)
    old = torch.tensor([-1.0, poison])
    mask = torch.tensor([True, False])
    loss, _ = policy_loss(logprobs, old, torch.tensor([2.0, poison]), mask, 0.2, 0.28)
    (loss.sum() + sft_loss(logprobs, mask).sum()).backward()
    assert loss.tolist() == [-2.0, 0.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-3.0, 0.0]


def test_sft_loss_is_the_negative_log_probability() -> None:
    assert sft_loss(torch.tensor([-0.5, -3.0]), torch.tensor([True, False])).tolist() == [0.5, 0.0]
