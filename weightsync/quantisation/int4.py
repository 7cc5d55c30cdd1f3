"""INT4: -8 to 7 times a scale for each group of inputs (or each output row), eight in an int32.

As compressed-tensors packs them (`pack-quantized`, github.com/vllm-project/compressed-tensors): symmetric, the value + 8 stands
in bits 4k to 4k + 3 of its word; scale = largest magnitude / 7.5. |error| <= scale / 2, and what rounding the scale to its own
type adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from physarum.weightsync.quantisation.scheme import finite, scales

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST, _HIGHEST = -8, 7
_SPAN: Final = 7.5
"""Half of what four bits span."""
_IN_WORD: Final = 8
_BITS: Final = 4


class Packed(msgspec.Struct, frozen=True):
    """weight_packed int32 [o, i / 8], weight_scale in the weight's own type [o, i / group], weight_shape int64 [2].

    `group` None: one scale for each output row.
    """

    group: int | None

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight_packed", "weight_scale", "weight_shape")

    def unfit(self, shape: tuple[int, ...]) -> str:
        unit = _IN_WORD if self.group is None else self.group
        return "" if shape[1] % unit == 0 else f"inputs divisible by {unit}"

    def quantise(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        import torch

        outputs, inputs = weight.shape
        groups = weight.detach().float().reshape(outputs, -1, self.group or inputs)
        scale = scales(finite(name, groups.abs().amax(2)), _SPAN)
        limits = torch.finfo(weight.dtype)
        scale = scale.clamp(limits.tiny, limits.max).to(weight.dtype)
        values = (groups / scale.float()[:, :, None]).round().clamp(_LOWEST, _HIGHEST).flatten(1)
        return {
            "weight_packed": packed(values.to(torch.int32)),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64, device=weight.device),
        }

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        scale = stored["weight_scale"].float()
        inputs = int(stored["weight_shape"][1])
        values = unpacked(stored["weight_packed"])[:, :inputs].float()
        return (values.reshape(*scale.shape, -1) * scale[:, :, None]).flatten(1)


def packed(values: Tensor) -> Tensor:
    """int32 [o, i] from -8 to 7 as int32 [o, i / 8]."""
    import torch

    shifts = torch.arange(0, _IN_WORD * _BITS, _BITS, dtype=torch.int32, device=values.device)
    words = (values - _LOWEST).reshape(values.shape[0], -1, _IN_WORD) << shifts
    return words.sum(2, dtype=torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """Inverse of `packed`."""
    import torch

    shifts = torch.arange(0, _IN_WORD * _BITS, _BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts & 15) + _LOWEST).flatten(1)
