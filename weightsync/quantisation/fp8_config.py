"""`quant_method: fp8` and `mxfp8`, as Hugging Face and DeepSeek write them and SGLang's Fp8Config reads them."""

from __future__ import annotations

from typing import Final

from physarum.weightsync.quantisation import modules
from physarum.weightsync.quantisation.fp8 import Blocks, Scaled
from physarum.weightsync.quantisation.mxfp8 import GROUP, Mx
from physarum.weightsync.quantisation.options import Options, block, refuse_unknown, require, texts
from physarum.weightsync.quantisation.scheme import Scheme

_SKIPS: Final = ("ignored_layers", "modules_to_not_convert")
"""The first that is there counts, as in SGLang."""
_KNOWN: Final = (
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "fmt",
    "scale_fmt",
    "dequantize",
    "packed_modules_mapping",  # names of the engine's fused layers: nothing of what is stored
    *_SKIPS,
)


class Fp8Rules:
    """One scheme for every linear layer that is not skipped. Raises QuantisationError."""

    def __init__(self, options: Options) -> None:
        refuse_unknown(options, _KNOWN)
        require(options, "fmt", (None, "e4m3"))
        require(options, "dequantize", (None, False), remedy="an engine that dequantises loads unquantised versions")
        remedy = "static scales of activations come from calibration, which a version has not; use dynamic"
        require(options, "activation_scheme", ("dynamic",), remedy=remedy)
        self._scheme = _scheme(options)
        self._skipped = next((texts(options, name) for name in _SKIPS if options.get(name) is not None), ())

    def scheme_of(self, module: str) -> Scheme | None:
        """None: the module's weight stays as it is."""
        if module.rpartition(".")[2] == modules.HEAD or modules.on_paths(module, self._skipped):
            return None
        return self._scheme


def _scheme(options: Options) -> Scheme:
    sizes, scale_format = block(options, "weight_block_size"), require(options, "scale_fmt", (None, "float", "ue8m0"))
    if options["quant_method"] == "mxfp8":
        if sizes is not None and sizes != (1, GROUP):
            require(options, "weight_block_size", ([1, GROUP],), remedy="MXFP8 has groups of 32 along the input")
        return Mx()
    if sizes is None:
        require(options, "scale_fmt", (None, "float"))
        return Scaled()
    return Blocks(*sizes, power_of_two=scale_format == "ue8m0")
