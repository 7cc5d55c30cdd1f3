"""MXFP8: float8 e4m3 in groups of 32 along the input, each with a power of two as its scale, stored as an exponent.

OCP Microscaling Formats (MX) v1.0. The exponent is rounded up, so that nothing saturates, as SGLang's own quantisation does;
the stored byte is the exponent + 127 (E8M0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from physarum.weightsync.quantisation.fp8 import LARGEST
from physarum.weightsync.quantisation.scheme import exponents, finite, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

GROUP: Final = 32
_BIAS: Final = 127


class Mx(msgspec.Struct, frozen=True):
    """weight e4m3 [o, i], weight_scale_inv uint8 [o, i / 32]."""

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "weight_scale_inv")

    def unfit(self, shape: tuple[int, ...]) -> str:
        return "" if shape[1] % GROUP == 0 else f"inputs divisible by {GROUP}"

    def quantise(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        import torch

        groups = weight.detach().float().reshape(weight.shape[0], -1, GROUP)
        exponent = exponents(finite(name, groups.abs().amax(2)), LARGEST)
        scaled = (groups / power_of_two(exponent)[:, :, None]).clamp(-LARGEST, LARGEST)
        return {
            "weight": scaled.to(torch.float8_e4m3fn).flatten(1),
            "weight_scale_inv": (exponent + _BIAS).to(torch.uint8),
        }

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        import torch

        scale = power_of_two(stored["weight_scale_inv"].to(torch.int32) - _BIAS)
        return stored["weight"].float() * scale.repeat_interleave(GROUP, 1)
