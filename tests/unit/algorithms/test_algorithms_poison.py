"""What a masked position holds reaches no value, no sum and no gradient, in any function that takes a mask."""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from physarum.actors.trainer import algorithms
from physarum.actors.trainer.algorithms import advantages, corrections, losses, masked, reduction, sequences, whitening
from physarum.actors.trainer.algorithms.corrections import correction, m2po

MASK = torch.tensor([True, False, True, True, False, True])
TWO = sequences.Sequences(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
AGES = torch.tensor([0, 1, 2, 3, 1, 0])
X = torch.tensor([-0.5, -1.0, -1.5, -0.2, -0.7, -2.0])
Y = torch.tensor([-0.6, -0.9, -1.1, -0.4, -0.3, -2.5])
Z = torch.tensor([1.0, -1.0, 0.5, -0.7, 0.3, 2.0])
PAIR = torch.tensor([1.0, -2.0])
CUTOFF = torch.tensor(0.1)
MASK_NAMES = {"mask", "valid", "present", "listed", "played", "kept"}

Case = Callable[[Tensor, Tensor, Tensor], Any]
"""From log-probabilities with gradient, other log-probabilities, and values, [6] each, poisoned where MASK is False."""


def _square(values: Tensor) -> Tensor:
    return values[None].expand(6, 6)


def _sums(x: Tensor, y: Tensor) -> sequences.SequenceSums:
    return sequences.log_ratio_sums(x, y, MASK, TWO)


CASES: dict[str, Case] = {
    "masked": lambda x, y, z: masked.masked(x, MASK),
    "bounded_log_ratio": lambda x, y, z: masked.bounded_log_ratio(x, y, MASK),
    "summed": lambda x, y, z: masked.summed(z, MASK),
    "counted": lambda x, y, z: masked.counted(MASK),
    "sequence_sums": lambda x, y, z: sequences.sequence_sums(x, MASK, TWO),
    "log_ratio_sums": lambda x, y, z: _sums(x, y),
    "spread": lambda x, y, z: sequences.spread(PAIR, MASK, TWO),
    "place_at_end": lambda x, y, z: sequences.place_at_end(PAIR, MASK, TWO),
    "padded_places": lambda x, y, z: sequences.padded_places(MASK, TWO).pad(z),
    "moments": lambda x, y, z: whitening.moments(z, MASK),
    "whiten": lambda x, y, z: whitening.whiten(z, MASK, whitening.moments(z, MASK)),
    "weighted_sum": lambda x, y, z: reduction.weighted_sum(x, MASK, torch.full((6,), 0.5)),
    "policy_loss": lambda x, y, z: losses.policy_loss(x, y, z, MASK, 0.2, 0.28, 3.0),
    "clipped_surrogate": lambda x, y, z: losses.clipped_surrogate(
        masked.masked(x, MASK).exp(), masked.masked(z, MASK), MASK, 0.2, 0.2
    ),
    "cispo_loss": lambda x, y, z: losses.cispo_loss(x, y, z, MASK, 1.0, 1.0),
    "gspo_loss": lambda x, y, z: losses.gspo_loss(x, y, z, MASK, TWO, 0.2, 0.2),
    "gspo_token_loss": lambda x, y, z: losses.gspo_token_loss(x, y, z, MASK, TWO, 0.2, 0.2),
    "sapo_loss": lambda x, y, z: losses.sapo_loss(x, y, z, MASK),
    "value_loss": lambda x, y, z: losses.value_loss(x, y, z, MASK, 0.2),
    "kl_penalty": lambda x, y, z: [losses.kl_penalty(x, y, MASK, k) for k in ("k1", "k2", "k3", "low-variance")],
    "unbiased_kl_penalty": lambda x, y, z: losses.unbiased_kl_penalty(x, y, z, MASK),
    "penalized_rewards": lambda x, y, z: losses.penalized_rewards(z, x, y, MASK, 0.1),
    "entropy_loss": lambda x, y, z: losses.entropy_loss(x, MASK),
    "sft_loss": lambda x, y, z: losses.sft_loss(x, MASK),
    "preference_loss": lambda x, y, z: [
        losses.preference_loss(x, y, z, y, MASK, 0.1),
        losses.preference_loss(x, y, z, y, MASK, 0.1, "ipo"),
    ],
    "generalized_advantages": lambda x, y, z: advantages.generalized_advantages(z, y, MASK, TWO, 0.9, 0.8),
    "discounted_returns": lambda x, y, z: advantages.discounted_returns(z, MASK, TWO, 0.9),
    "reinforce_plus_plus_returns": lambda x, y, z: advantages.reinforce_plus_plus_returns(PAIR, z, MASK, TWO),
    "reinforce_plus_plus_baseline_advantages": lambda x, y, z: advantages.reinforce_plus_plus_baseline_advantages(
        PAIR, [0, 0], MASK, TWO
    ),
    "tournament_scores": lambda x, y, z: advantages.tournament_scores(_square(z), _square(MASK)),
    "combine_signals": lambda x, y, z: [
        advantages.combine_signals(torch.stack([y, z]), torch.stack([MASK, MASK]), torch.tensor([1.0, 2.0]), missing)
        for missing in ("renormalise", "mask")
    ],
    "distillation_advantages": lambda x, y, z: advantages.distillation_advantages(y, x, MASK),
    "mixed_teachers": lambda x, y, z: advantages.mixed_teachers(
        torch.stack([y, z]), torch.stack([MASK, MASK]), torch.tensor([1.0, 2.0])
    ),
    "topk_tail_kl": lambda x, y, z: [
        advantages.topk_tail_kl(
            torch.stack([x - 1, x - 2], 1), torch.stack([y - 1, y - 2], 1), torch.ones(6, 2).bool(), MASK, d
        )
        for d in ("forward", "reverse")
    ],
    "importance_weights": lambda x, y, z: corrections.importance_weights(x, y, MASK),
    "sequence_importance_weights": lambda x, y, z: [
        corrections.sequence_importance_weights(_sums(x, y), MASK, TWO, level) for level in ("sequence", "geometric")
    ],
    "bounded_weights": lambda x, y, z: [
        corrections.bounded_weights(z, MASK, mode, 0.8, 0.2) for mode in ("truncate", "clip", "mask")
    ],
    "veto_counts": lambda x, y, z: corrections.veto_counts(x, y, MASK, TWO, 0.9),
    "veto": lambda x, y, z: corrections.veto(MASK, TWO, corrections.veto_counts(x, y, MASK, TWO, 0.9)),
    "icepop": lambda x, y, z: corrections.icepop(x, y, MASK, 0.9, 1.1),
    "off_policy_sequence_mask": lambda x, y, z: corrections.off_policy_sequence_mask(_sums(x, y), z, MASK, TWO, 0.0),
    "interpolated_proximal": lambda x, y, z: corrections.interpolated_proximal(x, y, AGES, MASK),
    "second_moments": lambda x, y, z: corrections.second_moments(x, y, MASK),
    "log_ratio_histogram": lambda x, y, z: m2po.log_ratio_histogram(x, y, MASK),
    "second_moment_mask": lambda x, y, z: corrections.second_moment_mask(x, y, MASK, CUTOFF),
    "divergence_mask": lambda x, y, z: [
        corrections.divergence_mask(x, y, z, MASK, 0.05, 0.05, divergence) for divergence in ("tv", "kl")
    ],
    "age_weights": lambda x, y, z: corrections.age_weights(AGES, MASK, corrections.AgeDecay(1.0, 0.5)),
    "oldest_ages": lambda x, y, z: corrections.oldest_ages(AGES, MASK, TWO),
    "mismatch_sums": lambda x, y, z: corrections.mismatch_sums(x, y, MASK, 1.1),
    "mismatch_by_age": lambda x, y, z: corrections.mismatch_by_age(x, y, MASK, AGES, 2),
    "identity": lambda x, y, z: corrections.identity(MASK).applied(x),
    "kept_tokens": lambda x, y, z: correction.kept_tokens(MASK, z > 0, {}).applied(x),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CASES)
def test_masked_positions_reach_nothing(name: str, poison: float) -> None:
    clean, clean_gradient = _run(CASES[name], [X, Y, Z])
    dirty, dirty_gradient = _run(CASES[name], [torch.where(MASK, values, poison) for values in (X, Y, Z)])
    assert clean, "the case returns no tensor"
    for before, after in zip(clean, dirty, strict=True):
        assert bool(torch.isfinite(after.double()).all())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(dirty_gradient, clean_gradient, rtol=0, atol=0)
    assert bool((dirty_gradient[~MASK] == 0).all())


def test_every_function_with_a_mask_is_among_the_cases() -> None:
    found = set()
    for info in pkgutil.walk_packages(algorithms.__path__, algorithms.__name__ + "."):
        for name, function in inspect.getmembers(importlib.import_module(info.name), inspect.isfunction):
            private = name.startswith("_") or not function.__module__.startswith(algorithms.__name__)
            if not private and MASK_NAMES & inspect.signature(function).parameters.keys():
                found.add(name)
    assert found == CASES.keys()


def _run(case: Case, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """All tensors that the case returns, detached, and the gradient of their sum."""
    leaf = inputs[0].clone().requires_grad_()
    outputs = list(_tensors(case(leaf, inputs[1], inputs[2])))
    differentiable = [output.sum() for output in outputs if output.requires_grad]
    if not differentiable:
        return outputs, torch.zeros(6)
    (gradient,) = torch.autograd.grad(torch.stack([total.double() for total in differentiable]).sum(), leaf)
    return [output.detach() for output in outputs], gradient


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from (tensor for _, value in sorted(result.items()) for tensor in _tensors(value))
    else:
        for part in result:
            yield from _tensors(part)
