"""Weights of a quantised folder as they were before: what a trainer starts from.

Invariant: a tensor that is stored quantised and that the folder's config.json does not explain is refused, never taken so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from physarum.weightsync.errors import QuantisationError
from physarum.weightsync.quantisation.plan import Quantisation

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN: Final = ("float64", "float32", "float16", "bfloat16")


class Dequantised:
    """`load` gives stored tensors by name, `stored` are the names of all; `quantisation` None: none is quantised."""

    def __init__(
        self, quantisation: Quantisation | None, stored: Collection[str], load: Callable[[str], Tensor]
    ) -> None:
        self._quantisation = quantisation
        self._stored = stored
        self._load = load

    def weight(self, name: str) -> Tensor:
        """The tensor that Hugging Face calls `name`; float32 where it was quantised.

        Raises QuantisationError, and what `load` raises for a name that it does not have.
        """
        scheme = self._quantisation.scheme_of(name) if self._quantisation is not None else None
        module = name.removesuffix("weight")
        names = {part: module + part for part in scheme.parts} if scheme is not None else {}
        if scheme is not None and all(one in self._stored for one in names.values()):
            return scheme.dequantise({part: self._load(one) for part, one in names.items()})
        tensor = self._load(name)
        if str(tensor.dtype).removeprefix("torch.") not in _PLAIN:
            raise QuantisationError(
                f"{name} is stored as {tensor.dtype}, and its config.json does not say how it was quantised"
                f" (expected {', '.join(names.values()) or 'a quantization_config'}): start from an unquantised model"
            )
        return tensor


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face folder under their names, as they are stored, one at a time."""
    from safetensors import safe_open  # with torch, in the thread that reads the model

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping: it has keys() only
                yield name, opened.get_tensor(name)
