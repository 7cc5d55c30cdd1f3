"""The quantization_config that an exported folder gets, by a short name."""

from __future__ import annotations

from typing import Any, Final

from physarum.weightsync.quantisation.plan import Quantisation

_FP8: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_INT4_WEIGHTS: Final[dict[str, Any]] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}
_INT4: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head", r"re:.*mlp\.gate$"],
}
PRESETS: Final = {"fp8": _FP8, "int4": _INT4}


def preset(name: str) -> Quantisation:
    """`fp8`: DeepSeek's blocks of 128 x 128. `int4`: compressed-tensors, groups of 32. KeyError for another name."""
    return Quantisation.of(PRESETS[name])
