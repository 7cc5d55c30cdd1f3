"""Dual clip, CISPO, GSPO, SAPO, value, KL, entropy and preference losses, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.logprobs import token_logprobs_and_entropy
from physarum.actors.trainer.algorithms.losses import (
    cispo_loss,
    entropy_loss,
    gspo_loss,
    gspo_token_loss,
    kl_penalty,
    penalized_rewards,
    policy_loss,
    preference_loss,
    sapo_loss,
    unbiased_kl_penalty,
    value_loss,
)
from physarum.actors.trainer.algorithms.sequences import Sequences, log_ratio_sums

LN2 = math.log(2.0)


def _every(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=torch.bool)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely() -> None:
    # A = -1, c = 3: ratio 8 -> loss 3 instead of 8, without gradient; ratio 2 -> 2; A = 1 is not touched
    logprobs = torch.tensor([8.0, 2.0, 8.0]).log().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 1.0])
    loss, sums = policy_loss(logprobs, torch.zeros(3), advantages, _every(advantages), 0.2, 0.28, dual_clip=3.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([3.0, 2.0, -1.28], rel=1e-6)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert int(sums["dual_clipped"]) == 1


def test_a_dual_clip_of_one_or_less_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1).bool(), 0.2, 0.2, dual_clip=1.0)


def test_a_log_ratio_beyond_every_float_stays_finite() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([-1e4, 1e4]), torch.tensor([-1.0, 0.0]), torch.ones(2).bool(), 0.2, 0.2
    )
    loss.sum().backward()
    assert float(loss[0].detach()) == pytest.approx(math.exp(20.0), rel=1e-5)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    # ratios 4, 1, 0.25; weights cut to [0, 2]: 2, 1, 0.25; loss = -w A log p; gradient = -w A
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = logprobs.detach() - torch.tensor([4.0, 1.0, 0.25]).log()
    advantages = torch.tensor([1.0, -1.0, 3.0])
    loss, sums = cispo_loss(logprobs, old, advantages, _every(old), clip_low=1.0, clip_high=1.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([2.0, -2.0, 2.25])
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-2.0, 1.0, -0.75])
    assert int(sums["clipped"]) == 1


def test_gspo_takes_the_geometric_mean_over_trained_tokens() -> None:
    # sequence 0: log-ratios ln 2, (masked), ln 8: mean ln 4, clipped at 3; sequence 1: ratio 0.5, not clipped with A > 0
    log_ratio = torch.tensor([LN2, math.nan, 3 * LN2, -LN2])
    sequences = Sequences(torch.tensor([0, 0, 0, 1]), 2)
    mask = torch.tensor([True, False, True, True])
    loss, sums = gspo_loss(log_ratio, torch.zeros(4), torch.ones(4), mask, sequences, clip_low=0.2, clip_high=2.0)
    assert loss.tolist() == pytest.approx([-3.0, 0.0, -3.0, -0.5])
    assert int(sums["clipped"]) == 2


def test_gspo_token_equals_gspo_in_value_and_gradient_for_one_advantage_per_sequence() -> None:
    # s = exp((0.1 + 0.3) / 2) = e^0.2; with weights 1/2 each token's gradient is -s A / 2
    old = torch.tensor([-1.1, -1.3])
    sequences, mask, advantages = Sequences(torch.tensor([0, 0]), 1), torch.ones(2).bool(), torch.tensor([2.0, 2.0])
    gradients = []
    for objective in (gspo_loss, gspo_token_loss):
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        loss, _ = objective(logprobs, old, advantages, mask, sequences, 0.5, 0.5)
        (0.5 * loss).sum().backward()
        assert loss.tolist() == pytest.approx([-2 * math.exp(0.2)] * 2)
        assert logprobs.grad is not None
        gradients.append(logprobs.grad.tolist())
    assert gradients[0] == pytest.approx([-math.exp(0.2)] * 2)
    assert gradients[1] == pytest.approx(gradients[0])


def test_gspo_token_with_sums_from_two_ranks_equals_the_whole_sequence() -> None:
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.9, -0.6])
    whole, every = Sequences(torch.zeros(3, dtype=torch.int64), 1), torch.ones(3).bool()
    sums = log_ratio_sums(logprobs, old, every, whole)
    expected, _ = gspo_token_loss(logprobs, old, torch.ones(3), every, whole, 0.5, 0.5)
    part = Sequences(torch.zeros(1, dtype=torch.int64), 1)
    last, _ = gspo_token_loss(logprobs[2:], old[2:], torch.ones(1), every[2:], part, 0.5, 0.5, sums)
    assert last.tolist() == expected[2:].tolist()


def test_sapo_is_the_policy_gradient_on_policy_and_fades_off_it() -> None:
    # ratio 1: gate 4 / tau * 1/2 = 2 / tau; gradient 4 * 1/4 = 1 times A
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -1.0 - math.log(3.0)])
    loss, _ = sapo_loss(logprobs, old, torch.tensor([1.0, -1.0, 1.0]), torch.ones(3).bool(), 1.0, 2.0)
    loss.sum().backward()
    # ratio 3, tau 1: sigmoid(2) = 0.8808; slope 4 * 0.8808 * 0.1192 * 3 = 1.2599
    assert loss.tolist() == pytest.approx([-2.0, 1.0, -3.5232], rel=1e-4)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-1.0, 1.0, -1.2599], rel=1e-3)


def test_the_value_loss_takes_the_worse_of_clipped_and_free_error() -> None:
    # V 3, old 1, clip 0.5 -> 1.5: target 4: free 1, clipped 6.25 -> 3.125; target 1: free 4, clipped 0.25 -> 2
    values = torch.tensor([3.0, 3.0, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    loss, sums = value_loss(values, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([4.0, 1.0, 0.0]), mask, clip=0.5)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([3.125, 2.0, 0.0])
    assert values.grad is not None and values.grad.tolist() == [0.0, 2.0, 0.0]
    assert (int(sums["value_clipped"]), float(sums["squared_error"]), float(sums["return_squared"])) == (1, 5.0, 17.0)


def test_kl_estimators_by_hand() -> None:
    # d = ln 2: k1 = 0.6931; k2 = 0.2402; k3 = 1/2 - 1 + 0.6931;  d = -ln 20: k3 = 20 - 1 - 2.9957, cut at 10
    logprobs, reference = torch.tensor([LN2, -math.log(20.0)]), torch.zeros(2)
    every = torch.ones(2).bool()
    assert kl_penalty(logprobs, reference, every, "k1").tolist() == pytest.approx([LN2, -math.log(20.0)])
    assert kl_penalty(logprobs, reference, every, "k2")[0].item() == pytest.approx(LN2**2 / 2)
    assert kl_penalty(logprobs, reference, every, "k3").tolist() == pytest.approx([LN2 - 0.5, 19 - math.log(20.0)])
    assert kl_penalty(logprobs, reference, every, "low-variance").tolist() == pytest.approx([LN2 - 0.5, 10.0])


def test_expected_values_and_gradients_of_the_estimators_are_what_the_docstring_says() -> None:
    """Exact expectations over a softmax of three tokens; the sampling policy differs from the trained one."""
    reference = torch.tensor([0.6, 0.3, 0.1]).log()
    old = torch.tensor([0.2, 0.5, 0.3]).log()
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    logprobs, every = logits.log_softmax(0), torch.ones(3).bool()
    p = logprobs.detach().exp()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()

    def gradient(value: Tensor) -> list[float]:
        (result,) = torch.autograd.grad(value, logits, retain_graph=True)
        return [float(entry) for entry in result]

    k1, k2, k3 = (kl_penalty(logprobs, reference, every, kind) for kind in ("k1", "k2", "k3"))
    unbiased = unbiased_kl_penalty(logprobs, old, reference, every)
    value = float(exact.detach())
    assert float((p * k1).sum().detach()) == pytest.approx(value, rel=1e-5)
    assert float((p * k3).sum().detach()) == pytest.approx(value, rel=1e-5)
    assert float((old.exp() * unbiased).sum().detach()) == pytest.approx(value, rel=1e-5)
    assert gradient((p * k1).sum()) == pytest.approx([0.0] * 3, abs=1e-6)
    assert gradient((p * k2).sum()) == pytest.approx(gradient(exact), abs=1e-6)
    assert gradient((p * k3).sum()) == pytest.approx(gradient(forward), abs=1e-6)
    assert gradient((old.exp() * unbiased).sum()) == pytest.approx(gradient(exact), abs=1e-6)


def test_a_penalty_in_the_reward_is_detached() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    rewards = penalized_rewards(
        torch.tensor([0.0, 1.0]), logprobs, torch.tensor([-2.0, -2.5]), torch.ones(2).bool(), 0.1
    )
    assert rewards.tolist() == pytest.approx([-0.1, 0.95])
    assert not rewards.requires_grad


def test_the_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    # odds 3 : 1; dH/dz_1 = -p_1 (log p_1 + H), p_1 = 3/4
    logits = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    _, entropy = token_logprobs_and_entropy(logits, torch.tensor([0]), 1.0, entropy_gradient=True)
    entropy_loss(entropy, torch.ones(1).bool()).sum().backward()
    h = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    slope = 0.75 * (math.log(0.75) + h)
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([slope, -slope], rel=1e-5)


def test_entropy_and_logprob_gradients_add_up() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 2, 2])

    def both(x: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs_and_entropy(x, targets, 0.6, entropy_gradient=True)
        return logprobs + 0.3 * entropy

    assert torch.autograd.gradcheck(both, (logits,))


def test_an_entropy_that_is_only_a_metric_carries_no_graph() -> None:
    _, entropy = token_logprobs_and_entropy(torch.zeros(1, 2, requires_grad=True), torch.tensor([0]), 1.0)
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        token_logprobs_and_entropy(torch.zeros(1, 2), torch.tensor([0]), temperature)


def test_preference_losses_by_hand() -> None:
    # pair 0: h = (-1 - -2) - (-4 - -3) = 2; pair 1 is not valid; beta 0.5: -log sigmoid(1); ipo: (2 - 1)^2
    chosen = torch.tensor([-1.0, math.nan], requires_grad=True)
    sides = torch.tensor([-4.0, 0.0]), torch.tensor([-2.0, 0.0]), torch.tensor([-3.0, math.inf])
    valid = torch.tensor([True, False])
    loss, sums = preference_loss(chosen, *sides, valid, beta=0.5)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.0)), 0.0])
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx([-0.5 / (1 + math.e), 0.0])
    assert {name: float(value) for name, value in sums.items()} == {"pairs": 1.0, "pairs_right": 1.0, "margin": 1.0}
    assert preference_loss(chosen, *sides, valid, beta=0.5, kind="ipo")[0].tolist() == pytest.approx([1.0, 0.0])
    smooth, _ = preference_loss(chosen, *sides, valid, beta=0.5, label_smoothing=0.25)
    assert smooth[0].item() == pytest.approx(0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.e))
