"""On-policy distillation: the teacher's opinion of the tokens that the student sampled.

Invariant: advantages are detached; a token without a teacher's log-probability is masked, not 0.
"""

from typing import Literal

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.masked import masked

Direction = Literal["forward", "reverse"]

TAIL_FLOOR = -1e-7
"""Largest log-mass of the listed tokens: at least 1e-7 of the probability is left to the tail, so that its logarithm is
finite."""


def distillation_advantages(teacher: Tensor, student: Tensor, mask: Tensor, bound: float = float("inf")) -> Tensor:
    """A_t = log p_teacher - log p_student of the sampled token, float32 [T]; 0 where masked.

    -A_t is the one-sample estimate of KL(student || teacher), so policy gradient with it lowers the reverse KL
    (arXiv 2306.08543; "On-Policy Distillation", Thinking Machines 2025). `mask` is False where the teacher gave no
    log-probability. Values are cut to [-bound, bound] nats.
    """
    return masked((teacher - student).detach(), mask).clamp(-bound, bound).float()


def mixed_teachers(teachers: Tensor, present: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_s w_s p_s of several teachers, float32 [T], and where at least one spoke, bool [T].

    `teachers` [S, T] log-probabilities, `present` [S, T], `weights` [S] positive; weights of the teachers present are
    renormalised to 1. (Advantages per teacher joined by signals.combine_signals are the geometric mixture instead.)
    """
    log_weights = weights.double().log()[:, None].expand(teachers.shape)
    spoken = present.any(0)
    nothing = torch.full_like(log_weights, -torch.inf)
    joint = torch.where(present, teachers.detach().double() + log_weights, nothing).logsumexp(0)
    mass = torch.where(present, log_weights, nothing).logsumexp(0)
    return torch.where(spoken, joint - torch.where(spoken, mass, 0.0), 0.0).float(), spoken


def topk_tail_kl(
    student: Tensor, teacher: Tensor, listed: Tensor, mask: Tensor, direction: Direction = "forward"
) -> Tensor:
    """KL over K listed tokens and one bin for all others, [T]; 0 where masked. Differentiable in `student`.

    forward: sum_b t_b log(t_b / s_b);  reverse: sum_b s_b log(s_b / t_b), over the K + 1 bins, the last holding
    1 - sum of the listed: the exact KL of the coarser distributions, so never negative, and a lower bound of the full
    KL. Without the tail bin the student could lower the sum by moving mass out of the list.
    `student`, `teacher` [T, K]: log-probabilities of the same token ids under the full softmax (columns.py gathers the
    student's); `listed` [T, K] is False where a row has fewer than K ids; `mask` [T].
    """
    valid = listed & mask[:, None]
    nothing = torch.full((), -torch.inf, dtype=torch.float64, device=student.device)
    log_s = _with_tail(torch.where(valid, student.double(), nothing))
    log_t = _with_tail(torch.where(valid, teacher.detach().double(), nothing))
    bins = torch.cat([valid, mask[:, None]], 1)
    log_s, log_t = masked(log_s, bins), masked(log_t, bins)
    difference, weight = (log_t - log_s, log_t) if direction == "forward" else (log_s - log_t, log_s)
    return masked(weight.exp() * difference, bins).sum(1).to(student.dtype)


def _with_tail(log_listed: Tensor) -> Tensor:
    """Appends log(1 - sum of the listed), [T, K] -> [T, K + 1]; log-probabilities of absent ids are -inf."""
    none = torch.isneginf(log_listed).all(1, keepdim=True)
    mass = torch.where(none, 0.0, log_listed).logsumexp(1, keepdim=True)
    tail = torch.log(-torch.expm1(mass.clamp(max=TAIL_FLOOR)))
    return torch.cat([log_listed, torch.where(none, 0.0, tail)], 1)
