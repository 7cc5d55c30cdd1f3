"""Results do not depend on packing order or on the split into microbatches, and on-policy data is left as it is."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from physarum.actors.trainer.algorithms import corrections as c
from physarum.actors.trainer.algorithms import losses
from physarum.actors.trainer.algorithms.advantages import generalized_advantages, reinforce_plus_plus_returns
from physarum.actors.trainer.algorithms.reduction import Reduction, sequence_weights, weighted_sum
from physarum.actors.trainer.algorithms.sequences import Sequences, log_ratio_sums
from physarum.actors.trainer.algorithms.whitening import Moments, moments, whiten


class Piece(NamedTuple):
    """One sequence."""

    logprobs: Tensor
    engine: Tensor
    values: Tensor
    mask: Tensor
    ages: Tensor


class Row(NamedTuple):
    """Sequences packed into one row."""

    logprobs: Tensor
    engine: Tensor
    values: Tensor
    mask: Tensor
    ages: Tensor
    sequences: Sequences


def _pieces(lengths: list[int], seed: int) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    return [
        Piece(
            logprobs=-draw(n).abs(),
            engine=-draw(n).abs(),
            values=draw(n),
            mask=(draw(n) > -0.7) | (torch.arange(n) == 0),
            ages=torch.randint(0, 4, (n,), generator=generator),
        )
        for n in lengths
    ]


def _pack(pieces: list[Piece]) -> Row:
    columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
    lengths = torch.tensor([len(piece.mask) for piece in pieces])
    return Row(*columns, Sequences(torch.arange(len(pieces)).repeat_interleave(lengths), len(pieces)))


def _corrected(row: Row) -> dict[str, c.Correction]:
    """Every correction that needs no statistic of the batch."""
    sums = log_ratio_sums(row.logprobs, row.engine, row.mask, row.sequences)
    token = c.importance_weights(row.logprobs, row.engine, row.mask)
    sequence = c.sequence_importance_weights(sums, row.mask, row.sequences, "sequence")
    geometric = c.sequence_importance_weights(sums, row.mask, row.sequences, "geometric")
    by_age = c.by_age(c.AgeDecay(1.0, 0.7, offset=1.0), row.ages)
    oldest = c.by_age(c.AgeTable((3.0, 2.0, 1.5)), c.oldest_ages(row.ages, row.mask, row.sequences))
    vetoes = c.veto_counts(row.logprobs, row.engine, row.mask, row.sequences, 0.2)
    return {
        "tis": c.bounded_weights(token, row.mask, "truncate", high=2.0),
        "tis by age": c.bounded_weights(token, row.mask, "truncate", high=by_age),
        "sequence": c.bounded_weights(sequence, row.mask, "mask", high=oldest, low=0.3),
        "geometric": c.bounded_weights(geometric, row.mask, "clip", high=1.2, low=0.8),
        "icepop": c.icepop(row.logprobs, row.engine, row.mask),
        "opsm": c.off_policy_sequence_mask(sums, row.values, row.mask, row.sequences, 0.1),
        "dppo": c.divergence_mask(row.logprobs, row.engine, row.values, row.mask, 0.2, 0.2),
        "dppo kl": c.divergence_mask(row.logprobs, row.engine, row.values, row.mask, 0.05, 0.05, "kl"),
        "veto": c.veto(row.mask, row.sequences, vetoes),
        "m2po": c.second_moment_mask(row.logprobs, row.engine, row.mask, torch.tensor(1.0)),
    }


def _losses(row: Row) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    tokens = (row.logprobs, row.engine, row.values, row.mask)
    proximal = c.interpolated_proximal(row.logprobs, row.engine, row.ages, row.mask)
    return {
        "ppo": losses.policy_loss(*tokens, 0.2, 0.28, 3.0),
        "cispo": losses.cispo_loss(*tokens, 1.0, 1.0),
        "gspo": losses.gspo_loss(*tokens, row.sequences, 0.2, 0.2),
        "gspo token": losses.gspo_token_loss(*tokens, row.sequences, 0.2, 0.2),
        "sapo": losses.sapo_loss(*tokens),
        "value": losses.value_loss(*tokens, 0.2),
        "decoupled": losses.policy_loss(row.logprobs, proximal, row.values, row.mask, 0.2, 0.28),
    }


def _advantages(row: Row, batch: Moments) -> dict[str, Tensor]:
    ends = torch.arange(row.sequences.count, dtype=torch.float64)
    return {
        "gae": generalized_advantages(row.values, row.engine, row.mask, row.sequences, 0.9, 0.8)[0],
        "rpp": reinforce_plus_plus_returns(0 * ends, row.values, row.mask, row.sequences, 0.9),
        "whitened": whiten(row.values, row.mask, batch),
    }


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 10_000))
def test_packing_order_does_not_matter(lengths: list[int], seed: int) -> None:
    pieces = _pieces(lengths, seed)
    order = random.Random(seed).sample(range(len(pieces)), len(pieces))
    first, second = _pack(pieces), _pack([pieces[index] for index in order])
    batch = moments(first.values, first.mask)
    for one, other in zip(_outputs(first, batch), _outputs(second, batch), strict=True):
        parts = one.split(lengths)
        torch.testing.assert_close(other, torch.cat([parts[index] for index in order]), rtol=1e-6, atol=1e-6)


def _outputs(row: Row, batch: Moments) -> list[Tensor]:
    per_token = [correction.weights for correction in _corrected(row).values()]
    per_token += [correction.mask for correction in _corrected(row).values()]
    return per_token + [loss for loss, _ in _losses(row).values()] + list(_advantages(row, batch).values())


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 5), st.integers(0, 10_000))
def test_sums_over_microbatches_are_those_of_the_whole(lengths: list[int], split: int, seed: int) -> None:
    pieces = _pieces(lengths, seed)
    whole = _sums(_pack(pieces))
    parts = [_sums(_pack(part)) for part in (pieces[:split], pieces[split:]) if part]
    for name, total in whole.items():
        torch.testing.assert_close(torch.stack([part[name] for part in parts]).sum(0), total, rtol=1e-6, atol=1e-6)


def _sums(row: Row) -> dict[str, Tensor]:
    sums = {f"{key}/{name}": value for key, item in _corrected(row).items() for name, value in item.sums.items()}
    sums |= {f"{key}/{name}": value for key, (_, item) in _losses(row).items() for name, value in item.items()}
    sums |= {f"{key}/loss": loss.sum() for key, (loss, _) in _losses(row).items()}
    mismatch = c.mismatch_sums(row.logprobs, row.engine, row.mask, 2.0)
    sums |= {f"mismatch/{name}": value for name, value in mismatch.items() if name != "max_logprob_diff"}
    sums |= {
        "by age": c.mismatch_by_age(row.logprobs, row.engine, row.mask, row.ages, 2),
        "histogram": c.log_ratio_histogram(row.logprobs, row.engine, row.mask),
        "moments": torch.stack(list(moments(row.values, row.mask))),
        "weights per token": c.weight_totals(_corrected(row)["tis"]),
        "weights per sequence": c.weight_totals(_corrected(row)["sequence"], row.sequences),
    }
    return {name: value.double() for name, value in sums.items()}


@pytest.mark.parametrize("reduction", ["token-mean", "execution-mean", "sequence-mean", "sequence-sum"])
def test_the_gradient_of_the_batch_does_not_depend_on_microbatches(reduction: Reduction) -> None:
    pieces = _pieces([5, 2, 4, 3], seed=7)
    counts, executions = [int(piece.mask.sum()) for piece in pieces], [0, 1, 1, 2]
    weights = sequence_weights(counts, executions, reduction)
    gradients = []
    for split in (0, 1, 3):
        leaves = [piece.logprobs.clone().requires_grad_() for piece in pieces]
        fresh = [piece._replace(logprobs=leaf) for piece, leaf in zip(pieces, leaves, strict=True)]
        for part in (range(split), range(split, 4)):
            if part:
                row = _pack([fresh[index] for index in part])
                scale = torch.cat([torch.full((len(fresh[index].mask),), weights[index]) for index in part])
                per_token, _ = losses.gspo_loss(*row[:4], row.sequences, 0.5, 0.5)
                weighted_sum(_corrected(row)["tis"].applied(per_token), row.mask, scale).backward()
        gradients.append(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 10_000))
def test_on_policy_every_correction_is_the_identity(lengths: list[int], seed: int) -> None:
    pieces = [piece._replace(engine=piece.logprobs) for piece in _pieces(lengths, seed)]
    row = _pack(pieces)
    for name, correction in _corrected(row).items():
        assert correction.weights.tolist() == row.mask.double().tolist(), name
        assert correction.mask.tolist() == row.mask.tolist(), name
    totals = c.weight_totals(_corrected(row)["tis"])
    assert c.normalized_weights(_corrected(row)["tis"], totals).weights.tolist() == row.mask.double().tolist()
    proximal = c.interpolated_proximal(row.logprobs, row.engine, row.ages, row.mask)
    assert proximal[row.mask].tolist() == row.logprobs[row.mask].tolist()
    cutoff = c.histogram_cutoff(c.log_ratio_histogram(row.logprobs, row.engine, row.mask), 0.04)
    assert c.second_moment_mask(row.logprobs, row.engine, row.mask, cutoff).mask.tolist() == row.mask.tolist()


def test_on_policy_all_policy_losses_have_the_policy_gradient() -> None:
    row = _pack(_pieces([4, 3], seed=1))
    same = torch.where(row.sequences.ids == 0, 1.5, -0.5).double()
    for name in ("ppo", "cispo", "gspo token", "sapo", "decoupled"):
        leaf = row.logprobs.clone().requires_grad_()
        loss, _ = _losses(row._replace(logprobs=leaf, engine=row.logprobs, values=same))[name]
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(gradient, torch.where(row.mask, -same, 0.0), msg=name)
