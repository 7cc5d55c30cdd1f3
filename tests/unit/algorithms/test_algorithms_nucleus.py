"""Replay of the engine's kept set, on a tiny softmax by hand and over vocabulary shards."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from physarum.actors.trainer.algorithms import columns as module
from physarum.actors.trainer.algorithms.columns import chosen_logits
from physarum.actors.trainer.algorithms.logprobs import token_logprobs_and_entropy
from physarum.actors.trainer.algorithms.nucleus import kept_set_logprobs

PROBABILITIES = torch.tensor([[0.4, 0.3, 0.2, 0.1]])


def test_the_probability_is_renormalised_over_the_kept_set() -> None:
    # row 0 kept {0, 1}: 0.3 / 0.7; row 1 kept {0, 1, 2}: 0.4 / 0.9; row 2 has no record: 0.2
    logits, targets = PROBABILITIES.log().repeat(3, 1), torch.tensor([1, 0, 2])
    kept = torch.tensor([[0, 1, -1], [2, 0, 1], [-1, -1, -1]])
    whole, _ = token_logprobs_and_entropy(logits, targets, 1.0)
    replayed = kept_set_logprobs(logits, targets, kept, whole, 1.0)
    assert replayed.exp().tolist() == pytest.approx([0.3 / 0.7, 0.4 / 0.9, 0.2])


def test_the_temperature_comes_before_the_renormalisation() -> None:
    # temperature 1/2 squares the probabilities: 0.09 / (0.16 + 0.09)
    replayed = kept_set_logprobs(
        PROBABILITIES.log(), torch.tensor([1]), torch.tensor([[0, 1]]), torch.zeros(1), temperature=0.5
    )
    assert replayed.exp().tolist() == pytest.approx([0.36])


def test_a_record_without_the_sampled_token_still_counts_it_once() -> None:
    # kept {0} and target 1: 0.3 / 0.7, as if the record held both
    logits = PROBABILITIES.log()
    replayed = kept_set_logprobs(logits, torch.tensor([1]), torch.tensor([[0]]), torch.zeros(1), 1.0)
    assert replayed.exp().tolist() == pytest.approx([0.3 / 0.7])


def test_tokens_that_were_cut_off_have_no_gradient() -> None:
    logits = PROBABILITIES.log().requires_grad_()
    kept_set_logprobs(logits, torch.tensor([1]), torch.tensor([[0, 1, -1]]), torch.zeros(1), 1.0).sum().backward()
    # d log p(1) / d z = [-4/7, 1 - 3/7]
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([-4 / 7, 4 / 7, 0.0, 0.0])


def test_a_full_record_equals_the_whole_vocabulary_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, kept = torch.tensor([4, 0, 2]), torch.arange(5).repeat(3, 1)
    whole, _ = token_logprobs_and_entropy(logits, targets, 0.8)
    replayed = kept_set_logprobs(logits, targets, kept, whole, 0.8)
    torch.testing.assert_close(replayed, whole)
    (first,) = torch.autograd.grad(replayed.sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad(whole.sum(), logits)
    torch.testing.assert_close(first, second)


def test_shards_of_the_vocabulary_give_the_same_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards in one process: what each contributes is summed by hand (a real group: contract tests)."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ids, group = torch.tensor([[3, 0, -1]]), _Group()
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(module, "all_reduce", lambda values, _op, _group: parts.append(values) or values)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    gradients = []
    for rank in range(2):
        group.rank = rank
        shard = logits[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
        chosen = chosen_logits(shard, ids, 0.5, group)
        chosen[:, :2].sum().backward()
        gradients.append(shard.grad)
    assert sum(parts).tolist() == [[8.0, 2.0, 0.0]]
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [[[2.0, 0.0]], [[0.0, 2.0]]]


def test_absent_ids_are_minus_infinity() -> None:
    assert chosen_logits(torch.zeros(1, 2), torch.tensor([[1, -1]]), 1.0).tolist() == [[0.0, -math.inf]]


class _Group:
    rank: Any = 0
