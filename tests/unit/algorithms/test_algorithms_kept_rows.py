"""Log-probabilities from hidden states over the tokens that the engine kept: by hand, and as over whole logits."""

import math
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from physarum.actors.trainer.algorithms.linear_logprobs import linear_logprobs_and_entropy
from physarum.actors.trainer.algorithms.nucleus import KeptRows

ROWS, HIDDEN, VOCABULARY = 6, 5, 8
SETS = [[0, 1, 2], [], [7], [5, 4], [], [0, 1, 2, 3, 4, 5, 6, 7]]
"""Row 2 lacks its target; the last one kept everything."""
TARGETS = torch.tensor([2, 3, 6, 4, 0, 7])


def rows_of(sets: list[list[int]]) -> KeptRows:
    counts = torch.tensor([0, *(len(one) for one in sets)])
    return KeptRows(counts.cumsum(0), torch.tensor([token for one in sets for token in one], dtype=torch.int64))


def inputs() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=random, dtype=torch.float64)
    return hidden, torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=torch.float64)


def over_whole_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """z_t - logsumexp of the kept z, row by row; the target is always kept, no record means the whole vocabulary."""
    logits = hidden @ weight.T / temperature
    kept = [
        sorted({*one, int(target)} if one else range(VOCABULARY)) for one, target in zip(SETS, TARGETS, strict=True)
    ]
    return torch.stack(
        [row[target] - row[ids].logsumexp(0) for row, target, ids in zip(logits, TARGETS, kept, strict=True)]
    )


def test_by_hand() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1; {0, 1} kept: 0.3 / 0.7, and the entropy of (4/7, 3/7). No record: 0.2."""
    weight = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()[:, None].requires_grad_()
    hidden = torch.ones(2, 1, dtype=torch.float64)
    logprobs, entropy = linear_logprobs_and_entropy(
        hidden, weight, torch.tensor([1, 2]), 1.0, 4, chunk_rows=1, nucleus=rows_of([[0, 1], []])
    )
    assert logprobs.exp().tolist() == pytest.approx([3 / 7, 0.2])
    assert float(entropy[0]) == pytest.approx(-(4 / 7) * math.log(4 / 7) - (3 / 7) * math.log(3 / 7))
    (gradient,) = torch.autograd.grad(logprobs[0], weight)
    assert gradient[:, 0].tolist() == pytest.approx([-4 / 7, 4 / 7, 0.0, 0.0])


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_values_and_gradients_are_those_over_whole_logits(chunk_rows: int) -> None:
    hidden, weight = (one.requires_grad_() for one in inputs())
    expected = over_whole_logits(hidden, weight, 0.7)
    found, _ = linear_logprobs_and_entropy(
        hidden, weight, TARGETS, 0.7, VOCABULARY, chunk_rows=chunk_rows, nucleus=rows_of(SETS)
    )
    torch.testing.assert_close(found, expected)
    scale = torch.arange(1, ROWS + 1, dtype=torch.float64)
    ours = torch.autograd.grad((found * scale).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * scale).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs)


def test_the_entropys_gradient_is_its_own() -> None:
    hidden, weight = inputs()

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        found = linear_logprobs_and_entropy(
            hidden,
            weight,
            TARGETS,
            1.3,
            VOCABULARY,
            chunk_rows=4,
            entropy_gradient=True,
            nucleus=rows_of(SETS),
        )
        return torch.stack(found)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gradient_of_the_entropy_stays_finite(dtype: torch.dtype) -> None:
    """What was cut has probability 0 and a finite logit: 0 times it is 0, whatever it is multiplied with."""
    hidden, weight = (one.to(dtype).requires_grad_() for one in inputs())
    found = linear_logprobs_and_entropy(
        hidden, weight, TARGETS, 1.0, VOCABULARY, chunk_rows=4, entropy_gradient=True, nucleus=rows_of(SETS)
    )
    gradients = torch.autograd.grad((torch.stack(found) * 1e6).sum(), (hidden, weight))
    assert all(bool(torch.isfinite(one).all()) for one in (*found, *gradients))


def test_two_vocabulary_shards_give_the_values_and_gradients_of_one(tmp_path: Path) -> None:
    """Rows whose whole set lies in one shard, and one without a record, included."""
    processes.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    hidden, weight = (one.requires_grad_() for one in inputs())
    expected = over_whole_logits(hidden, weight, 0.7)
    to_hidden, to_weight = torch.autograd.grad(expected.sum(), (hidden, weight))
    answers = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for answer in answers:
        torch.testing.assert_close(answer["values"], expected.detach())
        torch.testing.assert_close(answer["hidden"], to_hidden)
    torch.testing.assert_close(torch.cat([answer["weight"] for answer in answers]), to_weight)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    hidden, weight = inputs()
    hidden.requires_grad_()
    shard = weight.chunk(2)[rank].clone().requires_grad_()
    found, _ = linear_logprobs_and_entropy(
        hidden, shard, TARGETS, 0.7, VOCABULARY, dist.group.WORLD, chunk_rows=4, nucleus=rows_of(SETS)
    )
    to_hidden, to_weight = torch.autograd.grad(found.sum(), (hidden, shard))
    torch.save({"values": found.detach(), "hidden": to_hidden, "weight": to_weight}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
