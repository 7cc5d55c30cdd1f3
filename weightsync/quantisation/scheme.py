"""The interface of all schemes: one weight of a linear layer to the tensors that are stored for it, and back.

Invariant: what a scheme makes is finite; a weight that is not, or whose shape the scheme does not have, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from physarum.weightsync.errors import NonFiniteWeightError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST: Final = 2.0**126


class Scheme(Protocol):
    """One way to store a weight [o, i]."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The last parts of the stored names, in place of `weight`."""

    def unfit(self, shape: tuple[int, ...]) -> str:
        """What a weight would need that one of this shape lacks, in words; empty where it can be stored."""

    def quantise(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """A tensor for each part, where `weight` [o, i] of any floating type is. Raises NonFiniteWeightError, naming it."""

    def dequantise(self, stored: Mapping[str, Tensor]) -> Tensor:
        """The weight [o, i] as float32; `stored` has a tensor for each part."""


def finite(name: str, largest: Tensor) -> Tensor:
    """`largest`, the magnitudes of parts of a weight. Raises NonFiniteWeightError: NaN and inf go through a maximum.

    So does what is so near to inf that rounding it upwards would make it that.
    """
    if not bool((largest <= _LARGEST).all()):
        raise NonFiniteWeightError(
            f"{name} holds inf, NaN or a number above 2**126; expected finite weights, nothing else can be quantised: withdraw"
            " this version (actorctl weights rollback), and lower the learning rate"
        )
    return largest


def scales(largest: Tensor, limit: float) -> Tensor:
    """float32: what the largest magnitude of each part is divided by to become `limit`; 1 for zeros, never below the
    smallest normal number, so no division makes inf or NaN."""
    import torch

    divided = (largest / limit).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(largest == 0, torch.ones_like(divided), divided)


def exponents(largest: Tensor, limit: float) -> Tensor:
    """int32: of the least powers of two that are not below `scales`; exact, by the bits of the number."""
    import torch

    mantissa, exponent = torch.frexp(scales(largest, limit))  # mantissa in [0.5, 1)
    return exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to the power of each, float32."""
    import torch

    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
