"""What an engine is asked to report of its choices, and the records of several replies as one.

    rows of experts   [start, P + N - 1): of a prompt of P tokens and N new ones, each as an input; the last never was one
    trajectory        a token's row is that of the request in which it first was an input: the one that its successor came from

Invariant: what nobody reported is all ones (255; -1), never guessed; a record that does not fit its tokens is none.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from physarum.bus.engine_choices import KeptTokens

Experts = npt.NDArray[Any]
"""uint8 or int16 [rows, MoE layers, top-k]."""

_CUTS: Final[Mapping[str, float]] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
_SMALL: Final = 255


class Capture(msgspec.Struct, frozen=True):
    """`layers`: which of the model's layers have experts, by number; empty: routing is not recorded. `total`: all layers."""

    layers: tuple[int, ...] = ()
    total: int = 0
    top_k: int = 0
    experts: int = 0
    nucleus: bool = False

    def asks(self, sampling: Mapping[str, Any], start: int) -> dict[str, Any]:
        """Fields of the request. Experts are wanted from input `start` on; kept tokens only where the sampling cuts any."""
        fields: dict[str, Any] = {}
        if self.layers:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": start}
        if self.nucleus and any(sampling.get(name, neutral) not in (neutral, None) for name, neutral in _CUTS.items()):
            fields["return_sampling_mask"] = True
        return fields

    def experts_of(self, encoded: str, rows: int) -> Experts | None:
        """SGLang's base64 of int32 [rows, all layers, top-k], of the layers with experts, in the smallest type; None for one
        of another size."""
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
        except (binascii.Error, ValueError):
            return None
        if flat.size != rows * self.total * self.top_k:
            return None
        chosen = flat.reshape(rows, self.total, self.top_k)[:, list(self.layers)]
        return chosen.astype(np.uint8 if self.experts <= _SMALL else np.int16)

    def nothing(self, rows: int) -> Experts:
        """No record of `rows` tokens."""
        return unrecorded(rows, self)


def unrecorded(rows: int, like: Capture) -> Experts:
    """All ones."""
    kind = np.dtype(np.uint8 if like.experts <= _SMALL else np.int16)
    return np.full((rows, len(like.layers), like.top_k), _none(kind), kind)


def extended(held: Experts | None, start: int, found: Experts) -> Experts:
    """`held`, rows [0, h), and those of `found`, rows [start, start + n), that are behind them; a gap has no record."""
    rows = 0 if held is None else len(held)
    gap = np.full((max(0, start - rows), *found.shape[1:]), _none(found.dtype), found.dtype)
    parts = [gap, found[max(0, rows - start) :]]
    return np.concatenate(parts if held is None else [held, *parts])


def cut(experts: Experts, rows: int) -> Experts:
    """Exactly `rows` rows: what is missing at the end has no record."""
    if len(experts) >= rows:
        return experts[:rows]
    return extended(experts, rows, experts[:0])


def kept_rows(lists: Sequence[Sequence[int]], count: int) -> KeptTokens | None:
    """SGLang's lists of ids, one for each of `count` tokens; None where there is another number of them."""
    return KeptTokens.of([list(row) for row in lists]) if len(lists) == count else None


def _none(kind: np.dtype[Any]) -> int:
    return _SMALL if kind == np.uint8 else -1
