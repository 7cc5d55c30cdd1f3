"""Distillation and several signals, against numbers worked out by hand and the exact KL of a tiny softmax."""

import math

import pytest
import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.advantages import (
    combine_signals,
    distillation_advantages,
    mixed_teachers,
    topk_tail_kl,
)
from physarum.actors.trainer.algorithms.advantages.distillation import Direction

ROW = torch.ones(1, dtype=torch.bool)


def test_the_advantage_is_teacher_minus_student_and_masked_where_the_teacher_is_silent() -> None:
    student = torch.tensor([-1.0, -2.0, -1.0, -9.0], requires_grad=True)
    teacher = torch.tensor([-0.5, -4.0, math.nan, -1.0])
    mask = torch.tensor([True, True, False, True])
    advantages = distillation_advantages(teacher, student, mask, bound=5.0)
    assert advantages.tolist() == pytest.approx([0.5, -2.0, 0.0, 5.0])
    assert not advantages.requires_grad


def test_two_teachers_are_mixed_and_a_silent_one_leaves_its_weight_to_the_other() -> None:
    # 0.75 * 0.8 + 0.25 * 0.4 = 0.7;  then only the second: 0.4;  then nobody
    teachers = torch.tensor([[0.8, math.nan, math.nan], [0.4, 0.4, math.nan]]).log()
    present = torch.tensor([[True, False, False], [True, True, False]])
    joint, spoken = mixed_teachers(teachers, present, torch.tensor([0.75, 0.25]))
    assert joint[:2].exp().tolist() == pytest.approx([0.7, 0.4])
    assert spoken.tolist() == [True, True, False]
    assert joint[2] == 0.0


def test_forward_kl_with_a_tail_bin_by_hand() -> None:
    # teacher 0.5, 0.3, tail 0.2; student 0.25, 0.25, tail 0.5
    student, teacher = torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.5, 0.3]]).log()
    listed = torch.ones(1, 2, dtype=torch.bool)
    forward = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(0.5 / 0.2)
    assert float(topk_tail_kl(student, teacher, listed, ROW, "forward")) == pytest.approx(forward, rel=1e-5)
    assert float(topk_tail_kl(student, teacher, listed, ROW, "reverse")) == pytest.approx(reverse, rel=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_descending_the_top_k_kl_brings_the_student_to_the_teacher(direction: Direction) -> None:
    """The student's full KL falls, which a sum over the list without a tail does not guarantee."""
    teacher = torch.tensor([[3.0, 1.0, 0.0, -1.0, -2.0]]).log_softmax(1)
    logits = torch.tensor([[-1.0, 2.0, 0.5, 1.0, 0.0]], requires_grad=True)
    top = teacher.topk(2).indices
    before = _full_kl(teacher, logits)
    for _ in range(200):
        loss = topk_tail_kl(
            logits.log_softmax(1).gather(1, top), teacher.gather(1, top), torch.ones(1, 2).bool(), ROW, direction
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        with torch.no_grad():
            logits -= 0.5 * gradient
    assert _full_kl(teacher, logits) < 0.25 * before
    torch.testing.assert_close(logits.softmax(1).gather(1, top), teacher.exp().gather(1, top), atol=1e-2, rtol=0)


def test_the_expected_gradient_of_the_sampled_advantage_is_that_of_the_exact_kl() -> None:
    # sum over all tokens of p * -A * grad log p is the gradient of KL(student || teacher)
    teacher = torch.tensor([0.2, 0.5, 0.3]).log()
    logits = torch.tensor([0.1, -0.4, 0.9], requires_grad=True)
    student = logits.log_softmax(0)
    advantages = distillation_advantages(teacher, student, torch.ones(3, dtype=torch.bool))
    (sampled,) = torch.autograd.grad((student.detach().exp() * -advantages * student).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_short_and_full_lists_have_finite_values_and_gradients() -> None:
    # row 0 lists one id of two; row 1 lists the whole probability; row 2 is masked and holds NaN
    student = torch.tensor([[0.5, math.nan], [0.6, 0.4], [math.nan, math.nan]]).log().requires_grad_()
    teacher = torch.tensor([[0.5, math.nan], [0.5, 0.5], [math.nan, math.nan]]).log()
    listed = torch.tensor([[True, False], [True, True], [True, True]])
    loss = topk_tail_kl(student, teacher, listed, torch.tensor([True, True, False]))
    loss.sum().backward()
    expected = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert loss.tolist() == pytest.approx([0.0, expected, 0.0], abs=1e-6)
    assert student.grad is not None and bool(torch.isfinite(student.grad).all())
    assert student.grad[2].tolist() == [0.0, 0.0]


def test_a_missing_signal_is_left_out_and_not_counted_as_zero() -> None:
    # weights 1 and 3: both: 1 * 2 + 3 * 4 = 14; only the first: 2 * (1 + 3) = 8; none: not trained
    values = torch.tensor([[2.0, 2.0, math.nan], [4.0, math.inf, math.nan]])
    present = torch.tensor([[True, True, False], [True, False, False]])
    weights = torch.tensor([1.0, 3.0])
    combined, trained = combine_signals(values, present, weights)
    assert combined.tolist() == [14.0, 8.0, 0.0]
    assert trained.tolist() == [True, True, False]
    combined, trained = combine_signals(values, present, weights, missing="mask")
    assert combined.tolist() == [14.0, 0.0, 0.0]
    assert trained.tolist() == [True, False, False]


def test_a_signal_without_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="expected positive"):
        combine_signals(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.tensor([0.0]))


def _full_kl(teacher: Tensor, logits: Tensor) -> float:
    student = logits.detach().log_softmax(1)
    return float((teacher.exp() * (teacher - student)).sum())
