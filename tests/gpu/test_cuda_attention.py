"""Attention over a pack by one flash kernel gives what torch's own gives for each segment, and needs no plan per shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (700, 333, 128, 65, 2, 1)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (16, 8, 128), (9, 3, 64), (8, 1, 256)])
def test_a_pack_by_one_kernel_is_each_segment_alone(heads: int, groups: int, width: int) -> None:
    from physarum.actors.trainer.megatron import flash
    from physarum.actors.trainer.megatron.layout import pack_layout

    torch.manual_seed(0)
    sizes = (heads, groups, groups)
    packed = [
        torch.randn(sum(LENGTHS), n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in sizes
    ]
    exact = [one.detach().double().requires_grad_() for one in packed]
    layout = pack_layout(LENGTHS, torch.device("cuda"))
    assert flash.fits(packed[0], packed[2], 0.0)
    found = flash.attention(*packed, layout.bounds, max(LENGTHS), 0.1)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one.narrow(0, start, length).transpose(0, 1) for one in exact), is_causal=True, scale=0.1, enable_gqa=True
        ).transpose(0, 1)
        for start, length in zip(layout.bounds.tolist(), LENGTHS, strict=False)
    ]
    expected = torch.cat(parts)
    pull = torch.randn_like(expected)
    found.backward(pull.bfloat16())
    expected.backward(pull)
    assert torch.allclose(found.double(), expected, atol=2e-2)
    for mine, theirs in zip(packed, exact, strict=True):
        off = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert off < 1e-2


def test_a_world_lets_torch_take_no_kernel_that_is_compiled_for_each_shape() -> None:
    from physarum.actors.trainer.megatron import flash

    flash.without_plans()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
