"""What a quantization_config makes of each tensor of a model, and the stream of tensors that does it.

Invariant: the same names, in the same order, for every version; one tensor is quantised at a time. Refused before anything is
written: a method or option that is not known, a weight whose shape its scheme does not have, one that is not finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from physarum.weightsync.errors import QuantisationError
from physarum.weightsync.quantisation import modules
from physarum.weightsync.quantisation.compressed_config import CompressedRules
from physarum.weightsync.quantisation.fp8 import Scaled
from physarum.weightsync.quantisation.fp8_config import Fp8Rules
from physarum.weightsync.quantisation.int4 import Packed
from physarum.weightsync.quantisation.options import Options, refused
from physarum.weightsync.quantisation.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT: Final = ".weight"
_FOUR_BITS: Final = "NVFP4 and MXFP4 are not made here: choose INT4 (compressed-tensors) or FP8"


class Rules(Protocol):
    def scheme_of(self, module: str) -> Scheme | None: ...


_METHODS: Final[dict[str, Callable[[Options], Rules]]] = {
    "fp8": Fp8Rules,
    "mxfp8": Fp8Rules,
    "compressed-tensors": CompressedRules,
}


class Quantisation:
    """One quantization_config; `options` is it, word for word."""

    def __init__(self, options: Mapping[str, Any], rules: Rules) -> None:
        self.options = dict(options)
        self._rules = rules

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Quantisation:
        """Raises QuantisationError naming what is not supported, and what is."""
        method = options.get("quant_method")
        rules = _METHODS.get(method) if isinstance(method, str) else None
        if rules is None:
            four_bits = isinstance(method, str) and ("modelopt" in method or "fp4" in method)
            raise refused(f"quant_method: {method!r}", _FOUR_BITS if four_bits else "")
        return cls(options, rules(options))

    @classmethod
    def in_folder(cls, folder: Path) -> Quantisation | None:
        """What the config.json of a Hugging Face folder says; None where it says nothing. Raises QuantisationError."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise QuantisationError(
                f"{folder}/config.json cannot be read ({error}); expected a model folder"
            ) from error
        options = options_in(config)
        try:
            return None if options is None else cls.of(options)
        except QuantisationError as error:
            raise QuantisationError(f"{folder}/config.json: {error}") from error

    def scheme_of(self, name: str) -> Scheme | None:
        """How a 2-D tensor of this name is stored; None: as it is."""
        module = name.removesuffix(_WEIGHT)
        if module == name or not modules.is_linear(module):
            return None
        return self._rules.scheme_of(module)

    def weight_of(self, name: str) -> str:
        """The weight of which a stored tensor is a part; the name itself, where it is none."""
        module, _, part = name.rpartition(".")
        scheme = self.scheme_of(f"{module}{_WEIGHT}")
        return f"{module}{_WEIGHT}" if scheme is not None and part in scheme.parts else name

    def loaded_once(self, name: str) -> bool:
        """Whether SGLang (0.5.23) replaces the parameters of this weight by others after its first load, which take no second
        one: all that is repacked, but for INT4 experts, which it unpacks before a load."""
        scheme = self.scheme_of(name)
        return isinstance(scheme, Scaled) or (isinstance(scheme, Packed) and ".experts." not in name)

    def tensors(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`named` with each quantised weight in place of its own. Raises QuantisationError, NonFiniteWeightError."""
        for name, tensor in named:
            scheme = self.scheme_of(name) if tensor.ndim == 2 else None
            if scheme is None:
                yield name, tensor
                continue
            check_fit(name, tuple(tensor.shape), scheme)
            module = name.removesuffix("weight")
            for part, stored in scheme.quantise(name, tensor).items():
                yield module + part, stored


def options_in(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, which older folders call compression_config."""
    found = config.get("quantization_config") or config.get("compression_config")
    if found is not None and not isinstance(found, dict):
        raise refused(repr(found), "it must be an object")
    return found


def check_fit(name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
    """Raises QuantisationError for a shape that a scheme cannot store."""
    lacking = scheme.unfit(shape) if 0 not in shape else "a weight that is not empty"
    if lacking:
        raise QuantisationError(
            f"{name} has shape {shape}, its scheme needs {lacking}: leave the layer out (ignore, modules_to_not_convert)"
            " in the quantization_config, or choose another scheme"
        )
