"""Logits of chosen columns, over vocabulary shards too."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from physarum.actors.trainer.algorithms import columns as module
from physarum.actors.trainer.algorithms.columns import chosen_logits


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
