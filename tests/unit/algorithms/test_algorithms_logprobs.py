"""Token log-probabilities and entropy, against hand numbers, log_softmax and finite differences."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.algorithms import logprobs as module
from physarum.actors.trainer.algorithms.logprobs import (
    token_logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)


def test_two_words_by_hand() -> None:
    # odds 3 : 1; at temperature 2 the odds are sqrt(3) : 1
    logits = torch.tensor([[math.log(3.0), 0.0]])
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([0]), 1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.75)], rel=1e-6)
    assert entropy.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25)], rel=1e-6)
    warmer, _ = token_logprobs_and_entropy(logits, torch.tensor([1]), 2.0)
    assert warmer.tolist() == pytest.approx([-math.log(1 + 3**0.5)], rel=1e-6)


def test_equals_log_softmax_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7])
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, 0.7)
    reference = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs, reference.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))
    assert torch.autograd.gradcheck(lambda x: token_logprobs_and_entropy(x, targets, 0.7)[0], (logits,))


def test_padded_columns_have_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 1e9, math.nan]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([1]), 1.0, vocab_size=2)
    logprobs.sum().backward()
    assert logprobs.tolist() == pytest.approx([-math.log(1 + math.exp(-1.0))], rel=1e-6)
    assert bool(torch.isfinite(entropy).all())
    assert logits.grad is not None and logits.grad[0, 2:].tolist() == [0.0, 0.0]


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits = torch.zeros(1, 3, dtype=torch.bfloat16)
    logprobs, _ = token_logprobs_and_entropy(logits, torch.tensor([0]), 1.0)
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx([-math.log(3.0)], rel=1e-6)


def test_rows_without_tokens_keep_the_graph() -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    logprobs, _ = token_logprobs_and_entropy(logits, torch.zeros(0, dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 4)


@pytest.mark.parametrize("vocab_size", [8, 6, 4])
def test_vocabulary_shards_give_the_whole_answer(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """Two shards in one process: the reductions are recorded from both and replayed (a real group: contract tests)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 8, generator=generator)
    targets = torch.tensor([0, vocab_size - 1, 2])
    whole, entropy = token_logprobs_and_entropy(logits, targets, 1.3, vocab_size)
    answers = _run_shards(monkeypatch, [logits[:, :4], logits[:, 4:]], targets, 1.3, vocab_size)
    for logprobs, shard_entropy in answers:
        torch.testing.assert_close(logprobs, whole)
        torch.testing.assert_close(shard_entropy, entropy)


def _run_shards(
    monkeypatch: pytest.MonkeyPatch, shards: list[Tensor], targets: Tensor, temperature: float, vocab_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Run all shards again and again, each pass knowing the result of one more reduction."""
    reduced: list[Tensor] = []
    calls: list[Tensor] = []

    def all_reduce(values: Tensor, _op: object, _group: object) -> Tensor:
        calls.append(values.clone())
        return reduced[len(calls) - 1] if len(calls) <= len(reduced) else values

    monkeypatch.setattr(module, "all_reduce", all_reduce)
    while True:
        answers, seen = [], []
        for rank, shard in enumerate(shards):
            calls.clear()
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            group: Any = None
            answers.append(vocab_parallel_logprobs_and_entropy(shard, targets, temperature, vocab_size, group))
            seen.append(list(calls))
        if len(reduced) == len(seen[0]):
            return answers
        parts = torch.stack([shard_calls[len(reduced)] for shard_calls in seen])
        reduced.append(parts.sum(0) if reduced else parts.amax(0))  # the first reduction is the maximum
