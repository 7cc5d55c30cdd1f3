"""Log-probabilities from hidden states: those of the whole logits, in value and gradient, for any chunk and any shard."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from physarum.actors.trainer.algorithms.linear_logprobs import linear_logprobs_and_entropy
from physarum.actors.trainer.algorithms.logprobs import token_logprobs_and_entropy

ROWS, HIDDEN, VOCABULARY, PADDED = 7, 5, 9, 12
SCALE = torch.tensor([[1.0], [0.3]])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=random, dtype=dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=random, dtype=dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS,), generator=random)


def gradients(found: tuple[Tensor, Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    """Of a loss that gives every row another weight, through both outputs."""
    weights = torch.arange(1, ROWS + 1, dtype=found[0].dtype)
    return torch.autograd.grad((torch.stack(found) * SCALE.to(found[0].dtype) * weights).sum(), leaves)


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
def test_values_and_gradients_are_those_of_the_whole_logits(chunk_rows: int) -> None:
    hidden, weight, targets = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    expected = token_logprobs_and_entropy(hidden @ weight.T, targets, 0.7, VOCABULARY, entropy_gradient=True)
    found = linear_logprobs_and_entropy(
        hidden, weight, targets, 0.7, VOCABULARY, chunk_rows=chunk_rows, entropy_gradient=True
    )
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    for ours, theirs in zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_gradient_is_the_functions_own() -> None:
    hidden, weight, targets = inputs()

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.stack(
            linear_logprobs_and_entropy(hidden, weight, targets, 1.3, PADDED, chunk_rows=2, entropy_gradient=True)
        )

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


def test_by_hand() -> None:
    """One row, weights (0, ln 2, ln 5): probabilities 1/8, 2/8, 5/8."""
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log()[:, None]
    hidden = torch.ones(1, 1, dtype=torch.float64)
    logprobs, entropy = linear_logprobs_and_entropy(hidden, weight, torch.tensor([2]), 1.0, 3, chunk_rows=1)
    p = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64) / 8
    assert float(logprobs) == pytest.approx(float(p[2].log()))
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()))


def test_padding_has_no_probability_and_no_gradient() -> None:
    hidden, weight, targets = inputs()
    weight[VOCABULARY:] = torch.nan
    weight.requires_grad_()
    found = linear_logprobs_and_entropy(hidden, weight, targets, 1.0, VOCABULARY, chunk_rows=3, entropy_gradient=True)
    (gradient,) = gradients(found, weight)
    assert bool(torch.isfinite(torch.stack(found)).all())
    assert bool((gradient[VOCABULARY:] == 0).all()) and bool((gradient[:VOCABULARY] != 0).any())


def test_the_entropy_has_a_gradient_only_when_asked() -> None:
    hidden, weight, targets = inputs()
    _, entropy = linear_logprobs_and_entropy(hidden.requires_grad_(), weight, targets, 1.0, PADDED, chunk_rows=3)
    assert not entropy.requires_grad


def test_no_rows_are_no_error() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = linear_logprobs_and_entropy(hidden[:0], weight, targets[:0], 1.0, PADDED, chunk_rows=3)
    assert logprobs.shape == entropy.shape == (0,)


def test_bfloat16_is_reduced_in_float32() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found = linear_logprobs_and_entropy(hidden, weight, targets, 1.0, VOCABULARY, chunk_rows=3)
    expected = token_logprobs_and_entropy(hidden @ weight.T, targets, 1.0, VOCABULARY)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        linear_logprobs_and_entropy(*inputs(), 0.0, PADDED, chunk_rows=3)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 5], ids=["both ranks hold a part", "one rank holds padding only"])
def test_two_ranks_give_the_values_and_gradients_of_one(tmp_path: Path, vocabulary: int) -> None:
    processes.spawn(_rank, args=(str(tmp_path), vocabulary), nprocs=2)
    hidden, weight, targets = inputs()
    found = linear_logprobs_and_entropy(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        targets % vocabulary,
        0.7,
        vocabulary,
        chunk_rows=3,
        entropy_gradient=True,
    )
    to_hidden, to_weight = gradients(found, hidden, weight)
    answers = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for answer in answers:
        torch.testing.assert_close(answer["values"], torch.stack(found).detach())
        torch.testing.assert_close(answer["hidden"], to_hidden)
    torch.testing.assert_close(torch.cat([answer["weight"] for answer in answers]), to_weight)


def _rank(rank: int, folder: str, vocabulary: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    hidden, weight, targets = inputs()
    shard = weight.chunk(2)[rank].clone().requires_grad_()
    found = linear_logprobs_and_entropy(
        hidden.requires_grad_(),
        shard,
        targets % vocabulary,
        0.7,
        vocabulary,
        dist.group.WORLD,
        chunk_rows=3,
        entropy_gradient=True,
    )
    to_hidden, to_weight = gradients(found, hidden, shard)
    values = torch.stack(found).detach()
    torch.save({"values": values, "hidden": to_hidden, "weight": to_weight}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
