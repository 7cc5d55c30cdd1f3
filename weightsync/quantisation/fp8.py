"""FP8: float8 e4m3 (4 bits of exponent, 3 of mantissa, largest 448) and float32 scales that it is multiplied by.

Blockwise as in DeepSeek-V3 (arXiv:2412.19437, section 3.3): one scale for each 128 x 128 weights; also one for each output
row, or one in all. Rounding is torch's, to nearest even: |error| <= max(|weight| / 16, scale / 1024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from physarum.weightsync.quantisation.scheme import exponents, finite, power_of_two, scales

if TYPE_CHECKING:
    from torch import Tensor

LARGEST: Final = 448.0
"""The largest float8_e4m3fn."""


class Blocks(msgspec.Struct, frozen=True):
    """weight e4m3 [o, i], scale float32 [ceil(o / rows), ceil(i / columns)]. `power_of_two`: scales are (`ue8m0`)."""

    rows: int = 128
    columns: int = 128
    scale: str = "weight_scale_inv"
    power_of_two: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def unfit(self, shape: tuple[int, ...]) -> str:
        return ""

    def quantise(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        from torch.nn.functional import pad

        outputs, inputs = weight.shape
        padded = pad(weight.detach().float(), (0, -inputs % self.columns, 0, -outputs % self.rows))
        blocks = padded.view(-(-outputs // self.rows), self.rows, -(-inputs // self.columns), self.columns)
        largest = finite(name, blocks.abs().amax((1, 3)))
        scale = power_of_two(exponents(largest, LARGEST)) if self.power_of_two else scales(largest, LARGEST)
        stored = _rounded(blocks / scale[:, None, :, None]).view(padded.shape)[:outputs, :inputs]
        return {"weight": stored.contiguous(), self.scale: scale}

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        weight = stored["weight"].float()
        scale = stored[self.scale].float().repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return weight * scale[: weight.shape[0], : weight.shape[1]]


class Scaled(msgspec.Struct, frozen=True):
    """weight e4m3 [o, i], weight_scale float32: [o, 1], one for `each_row`, else one in all of `scale_shape`, () or (1,)."""

    each_row: bool = False
    scale_shape: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "weight_scale")

    def unfit(self, shape: tuple[int, ...]) -> str:
        return ""

    def quantise(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        exact = weight.detach().float()
        largest = exact.abs().amax(1, keepdim=True) if self.each_row else exact.abs().amax().reshape(self.scale_shape)
        scale = scales(finite(name, largest), LARGEST)
        return {"weight": _rounded(exact / scale), "weight_scale": scale}

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        return stored["weight"].float() * stored["weight_scale"].float()


def _rounded(scaled: Tensor) -> Tensor:
    """What is over the limit by rounding would become NaN."""
    import torch

    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
