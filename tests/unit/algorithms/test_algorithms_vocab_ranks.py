"""The vocabulary split over two real processes: same values and gradients as on one."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from physarum.actors.trainer.algorithms.columns import chosen_logits
from physarum.actors.trainer.algorithms.logprobs import (
    token_logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)

RANKS = 2
VOCABULARY = 7
TARGETS = torch.tensor([0, 6, 3])
COLUMNS = torch.tensor([[0, 5, -1], [2, 6, 3], [1, -1, -1]])


def test_two_ranks_give_the_values_and_gradients_of_one(tmp_path: Path) -> None:
    processes.spawn(_rank, args=(str(tmp_path),), nprocs=RANKS)
    logits = _logits().requires_grad_()
    loss, values = _loss(logits, *token_logprobs_and_entropy(logits, TARGETS, 0.7, VOCABULARY, True), None)
    (gradient,) = torch.autograd.grad(loss, logits)
    answers = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for answer in answers:
        torch.testing.assert_close(answer["values"], values)
    torch.testing.assert_close(torch.cat([answer["gradient"] for answer in answers], 1), gradient)


def _logits() -> Tensor:
    """Eight columns, the last one padding."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _loss(logits: Tensor, logprobs: Tensor, entropy: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """A scalar that depends on everything, and the three rows of numbers."""
    chosen = chosen_logits(logits, COLUMNS, 0.7, group)
    values = torch.stack([logprobs, entropy, chosen.logsumexp(1)])
    return (values * torch.tensor([[1.0], [0.3], [-2.0]])).sum(), values.detach()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    shard = _logits()[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    found = vocab_parallel_logprobs_and_entropy(shard, TARGETS, 0.7, VOCABULARY, group, entropy_gradient=True)
    loss, values = _loss(shard, *found, group)
    (gradient,) = torch.autograd.grad(loss, shard)
    torch.save({"values": values, "gradient": gradient}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
