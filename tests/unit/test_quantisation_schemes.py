"""Quantised weights: how far they are from what they were, and what has no quantised form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from physarum.weightsync.errors import NonFiniteWeightError
from physarum.weightsync.quantisation.fp8 import Blocks, Scaled
from physarum.weightsync.quantisation.int4 import Packed, packed, unpacked
from physarum.weightsync.quantisation.mxfp8 import Mx
from physarum.weightsync.quantisation.scheme import Scheme

ALL: list[Scheme] = [
    Blocks(16, 48), Blocks(3, 5, power_of_two=True), Scaled(each_row=True), Scaled(), Scaled(scale_shape=(1,)), Mx(),
    Packed(32), Packed(None),
]  # fmt: skip
TINY = torch.finfo(torch.float32).tiny


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Sizes that are no multiple of a block (inputs are of 32, which groups need), zeros, and magnitudes of any size."""
    outputs, groups = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(outputs, 32 * groups, generator=generator)
    exponent = draw(st.integers(-120, 120))
    weight = torch.ldexp(weight, torch.tensor(exponent))
    zeros = draw(st.integers(0, outputs))
    weight[:zeros, : 32 * draw(st.integers(0, groups))] = 0
    return weight.to(dtype)


def restored(scheme: Scheme, weight: Tensor) -> Tensor:
    stored = scheme.quantise("w", weight)
    assert tuple(stored) == scheme.parts
    assert all(not one.is_floating_point() or bool(torch.isfinite(one.float()).all()) for one in stored.values())
    return scheme.dequantise(stored)


@settings(max_examples=20, deadline=None)
@given(weights())
@pytest.mark.parametrize("scheme", [one for one in ALL if not isinstance(one, Packed)])
def test_fp8_is_within_its_rounding(scheme: Scheme, weight: Tensor) -> None:
    """Half of the last of three mantissa bits; below the smallest normal number half of its unit, 2**-9 times the scale."""
    found, exact = restored(scheme, weight), weight.float()
    scale = (
        2 * exact.abs().max() / 448
    )  # of the whole weight: not below any part's, rounded up to a power of two or not
    allowed = torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-5) + 448 * TINY
    assert found.shape == exact.shape
    assert bool(((found - exact).abs() <= allowed).all())
    assert bool((found[exact == 0] == 0).all())


@settings(max_examples=20, deadline=None)
@given(weights())
@pytest.mark.parametrize("group", [32, 8, None])
def test_int4_is_within_half_a_scale(group: int | None, weight: Tensor) -> None:
    found, exact = restored(Packed(group), weight), weight.float()
    parts = exact.reshape(exact.shape[0], -1, group or exact.shape[1])
    # A scale in bfloat16 is off by 2**-9 of itself, and what is 7.5 of it by 7.5 times as much.
    step = parts.abs().amax(2, keepdim=True) / 7.5 * (0.5 + (8 * 2**-8 if weight.dtype is torch.bfloat16 else 1e-5))
    assert bool(((found.reshape(parts.shape) - parts).abs() <= step + 8 * TINY).all())
    assert bool((found[exact == 0] == 0).all())


@given(st.lists(st.integers(-8, 7), min_size=8, max_size=64).filter(lambda row: len(row) % 8 == 0))
def test_four_bits_are_packed_without_loss(row: list[int]) -> None:
    values = torch.tensor([row, row[::-1]], dtype=torch.int32)
    assert torch.equal(unpacked(packed(values)), values)


def test_words_hold_the_first_value_lowest() -> None:
    assert packed(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int32)).item() == 0xF6543210 - 2**32


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("value", [0.0, 1e-45, TINY, 8e37, -8e37])
def test_zeros_and_extremes_give_no_nan(scheme: Scheme, value: float) -> None:
    found = restored(scheme, torch.full((5, 64), value))
    assert bool(torch.isfinite(found).all())
    assert torch.allclose(found, torch.full((5, 64), value), rtol=0.08, atol=448 * TINY)


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_what_is_not_finite_is_refused_by_name(scheme: Scheme, value: float) -> None:
    weight = torch.ones(130, 160)
    weight[129, 159] = value
    with pytest.raises(NonFiniteWeightError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight holds inf, NaN"):
        scheme.quantise("model.layers.0.mlp.up_proj.weight", weight)


def test_blocks_at_the_edges_are_smaller() -> None:
    weight = torch.zeros(130, 257)
    weight[129, 256] = 448.0
    stored = Blocks().quantise("w", weight)
    assert stored["weight"].shape == (130, 257) and stored["weight"].dtype is torch.float8_e4m3fn
    assert torch.equal(stored["weight_scale_inv"], torch.ones(2, 3))
    assert stored["weight"].is_contiguous() and stored["weight"].float()[129, 256] == 448


def test_powers_of_two_are_exact_and_not_below_the_scale() -> None:
    largest = torch.tensor([448.0, 448.1, 447.9, 896.0])
    weight = largest[:, None].repeat(1, 32)
    assert Blocks(1, 32, power_of_two=True).quantise("w", weight)["weight_scale_inv"].flatten().tolist() == [1, 2, 1, 2]
    assert Mx().quantise("w", weight)["weight_scale_inv"].flatten().tolist() == [127, 128, 127, 128]


def test_the_weight_is_left_as_it_was() -> None:
    weight = torch.randn(4, 64)
    before = weight.clone()
    for scheme in ALL:
        scheme.quantise("w", weight)
    assert torch.equal(weight, before)
