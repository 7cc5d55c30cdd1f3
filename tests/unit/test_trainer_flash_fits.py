"""Which attention one flash kernel can do; everything else is left to torch's scaled_dot_product_attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from physarum.actors.trainer.megatron import flash  # noqa: E402


def tensor(width: int = 128, dtype: Any = torch.bfloat16, device: str = "cuda:0") -> Any:
    where = torch.device(device)
    return SimpleNamespace(size=lambda _: width, dtype=dtype, is_cuda=where.type == "cuda", device=where)


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {torch.device("cuda:0"): (9, 0), torch.device("cuda:1"): (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", of.__getitem__)
    flash._has_kernel.cache_clear()


@pytest.mark.parametrize("width", [8, 64, 96, 256])
def test_it_takes_the_widths_that_its_kernel_has(width: int) -> None:
    assert flash.fits(tensor(width), tensor(width), 0.0)


@pytest.mark.parametrize(
    ("query", "value", "dropout"),
    [
        (tensor(12), tensor(12), 0.0),
        (tensor(264), tensor(264), 0.0),
        (tensor(192), tensor(128), 0.0),
        (tensor(dtype=torch.float32), tensor(dtype=torch.float32), 0.0),
        (tensor(), tensor(), 0.1),
        (tensor(device="cpu"), tensor(device="cpu"), 0.0),
        (tensor(dtype=torch.float16, device="cuda:1"), tensor(dtype=torch.float16, device="cuda:1"), 0.0),
    ],
    ids=["not a multiple of 8", "too wide", "latent attention", "float32", "dropout", "cpu", "before Ampere"],
)
def test_what_its_kernel_refuses_is_left_to_torch(query: Any, value: Any, dropout: float) -> None:
    assert not flash.fits(query, value, dropout)
