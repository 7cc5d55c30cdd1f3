"""Runs in the engine's Python: what compressed-tensors and SGLang themselves make of the weights in a file.

    python quantised_reference.py FOLDER

In FOLDER: `weights.safetensors` with `weight` [o, i], `cases.json` with a quantization_config for each name; out:
`NAME.safetensors` as compressed-tensors stores it, `parameters.json`: what SGLang loads it into.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def compressed(given: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By compressed-tensors, with scales that it computes itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = options["config_groups"]["group_0"]
    weights = QuantizationArgs.model_validate(group["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=options["format"])
    weight = given["weight"]
    parts = weight.unflatten(1, (-1, weights.group_size)) if weights.group_size else weight[:, None]
    if weights.strategy == "tensor":
        parts = weight.reshape(1, 1, -1)
    scale, zero = calculate_qparams(parts.amin(2), parts.amax(2), weights)
    if weights.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = BaseCompressor.load_from_registry(options["format"]).compress(state, scheme)
    return {name: tensor for name, tensor in stored.items() if name != "weight_zero_point"}


def parameters(options: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """Names, shapes and types of the parameters into which SGLang loads a linear layer of this shape."""
    from sglang.srt.layers.quantization.base_config import QuantizationConfig  # noqa: F401  in the order of a server

    layer = torch.nn.Module()
    sizes = {
        "input_size_per_partition": shape[1],
        "output_partition_sizes": [shape[0]],
        "input_size": shape[1],
        "output_size": shape[0],
        "params_dtype": torch.float32,
        "weight_loader": lambda *_: None,
    }
    layer.tp_group = SimpleNamespace(world_size=1)
    if options["quant_method"] == "compressed-tensors":
        _compressed_scheme(options).create_weights(layer=layer, **sizes)
    else:
        from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

        config = Fp8Config.from_config(options)
        Fp8LinearMethod.create_fp8_weight_(
            layer,
            config.weight_block_size is not None,
            config,
            config.use_mxfp8,
            shape[0],
            shape[1],
            [shape[0]],
            shape[1],
            shape[0],
            torch.float32,
            sizes["weight_loader"],
            config.is_checkpoint_fp8_serialized,
        )
    return {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
        for name, one in layer.named_parameters()
        if one is not None
    }


def _compressed_scheme(options: dict[str, Any]) -> Any:
    """As CompressedTensorsConfig chooses it, less its question for the CUDA device."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.from_config(options)
    config._check_scheme_supported = lambda *_, **__: True
    found = config.target_scheme_map["Linear"]
    return config._get_scheme_from_parts(found["weights"], found["input_activations"], found.get("format"))


def main() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    folder = Path(sys.argv[1])
    given = load_file(folder / "weights.safetensors")
    found = {}
    for name, options in json.loads((folder / "cases.json").read_text()).items():
        if options["quant_method"] == "compressed-tensors":
            stored = compressed(given, options)
            save_file({one: tensor.contiguous() for one, tensor in stored.items()}, folder / f"{name}.safetensors")
        found[name] = parameters(options, tuple(given["weight"].shape))
    (folder / "parameters.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
