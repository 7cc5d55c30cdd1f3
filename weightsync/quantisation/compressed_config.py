"""`quant_method: compressed-tensors`: groups of layers, each with a scheme, as llm-compressor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from physarum.weightsync.quantisation import modules
from physarum.weightsync.quantisation.fp8 import Blocks, Scaled
from physarum.weightsync.quantisation.int4 import Packed
from physarum.weightsync.quantisation.options import Options, block, refuse_unknown, refused, require, texts
from physarum.weightsync.quantisation.scheme import Scheme

_LINEAR: Final = "Linear"
_KNOWN: Final = (
    "quant_method",
    "config_groups",
    "format",
    "ignore",
    "quantization_status",
    "global_compression_ratio",
    "version",
    "packed_modules_mapping",  # names of the engine's fused layers: nothing of what is stored
)
_GROUP_KNOWN: Final = ("targets", "weights", "input_activations", "format")
_WEIGHTS_KNOWN: Final = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
    *(
        "observer",
        "observer_kwargs",
        "zp_dtype",
    ),  # how scales were found, and zero points that a symmetric scheme has not
)
_FLOAT_FORMATS: Final = ("float-quantized", "naive-quantized")
_FP4: Final = (
    "NVFP4 needs one global scale for all layers that an engine fuses, and MXFP4 a kernel that is bound to it: choose"
    " INT4 (pack-quantized) or FP8 for an engine that follows versions"
)


class _Group(msgspec.Struct, frozen=True):
    targets: tuple[str, ...]
    scheme: Scheme


class CompressedRules:
    """The first group that means a layer, by its name before its class. Raises QuantisationError."""

    def __init__(self, options: Options) -> None:
        refuse_unknown(options, _KNOWN)
        require(options, "quantization_status", (None, "compressed"))
        groups = options.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise refused(f"config_groups: {groups!r}", "at least one group says what is quantised")
        self._groups = [_group(name, one, options.get("format")) for name, one in groups.items()]
        self._ignored = texts(options, "ignore")
        wrong = modules.bad_patterns([*self._ignored, *(one for group in self._groups for one in group.targets)])
        if wrong:
            raise refused(f"{wrong[0]!r}", "what follows `re:` must be a regular expression")

    def scheme_of(self, module: str) -> Scheme | None:
        """None: the module's weight stays as it is. The head is quantised only where a target names it."""
        if modules.named(module, self._ignored):
            return None
        for group in self._groups:
            if modules.named(module, group.targets):
                return group.scheme
        if module.rpartition(".")[2] == modules.HEAD:
            return None
        return next((group.scheme for group in self._groups if _LINEAR in group.targets), None)


def _group(name: str, options: Any, format_of_all: Any) -> _Group:
    where = f"config_groups.{name}."
    if not isinstance(options, Mapping) or not isinstance(options.get("weights"), Mapping):
        raise refused(f"config_groups.{name}: {options!r}", "a group has `weights` and `targets`")
    refuse_unknown(options, _GROUP_KNOWN, where)
    activations = options.get("input_activations")
    if activations is not None and (not isinstance(activations, Mapping) or activations.get("dynamic") is not True):
        raise refused(
            f"{where}input_activations that are not dynamic",
            "static scales of activations come from calibration, which a version has not; use dynamic",
        )
    one = {**options, "format": options.get("format") or format_of_all}
    return _Group(texts(options, "targets"), _scheme(one, options["weights"], where))


def _scheme(group: Options, weights: Options, where: str) -> Scheme:
    inside = f"{where}weights."
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind == "float" and bits == 4:
        raise refused(f"{inside}type: float with num_bits: 4", _FP4)
    if (kind, bits) not in (("float", 8), ("int", 4)):
        raise refused(f"{inside}type: {kind} with num_bits: {bits!r}")
    refuse_unknown(weights, _WEIGHTS_KNOWN, inside)
    require(weights, "symmetric", (None, True), inside, "zero points are not made here")
    require(weights, "dynamic", (None, False), inside)
    require(weights, "actorder", (None, False, "static", "weight"), inside, "an order of inputs comes from calibration")
    if kind == "int":
        require(group, "format", ("pack-quantized",), where)
        return _packed(weights, inside)
    require(group, "format", _FLOAT_FORMATS, where)
    return _float8(weights, inside)


def _packed(weights: Options, inside: str) -> Scheme:
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size not in (None, -1) else "channel")
    if strategy == "channel" and size in (None, -1):
        return Packed(None)
    if strategy != "group" or type(size) is not int or size <= 0 or size % 8:
        raise refused(f"{inside}strategy: {strategy} with group_size: {size!r}", "a group is a multiple of 8 inputs")
    return Packed(size)


def _float8(weights: Options, inside: str) -> Scheme:
    strategy = require(weights, "strategy", (None, "tensor", "channel", "block"), inside)
    if weights.get("group_size") not in (None, -1):
        raise refused(f"{inside}group_size: {weights['group_size']!r}")
    if strategy == "channel":
        return Scaled(each_row=True)
    sizes = block(weights, "block_structure", inside)
    if strategy != "block":
        return Scaled(scale_shape=(1,))
    if sizes is None:
        raise refused(f"{inside}strategy: block without block_structure")
    return Blocks(*sizes, scale="weight_scale")
