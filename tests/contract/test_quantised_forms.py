"""Quantised tensors have the names, types, shapes and bits that compressed-tensors makes and SGLang loads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from physarum.actors.engine.environment import engine_python
from physarum.configs.engine import EngineConfig
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.presets import PRESETS

ROOT: Final = Path(__file__).parents[2]
NAME: Final = "model.layers.0.mlp.up_proj."
SHAPE: Final = (192, 256)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    weights = {"symmetric": True, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    if weights["type"] == "float":
        group["input_activations"] = activations
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8: Final[dict[str, Any]] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CASES: Final = {
    **PRESETS,
    "fp8_powers": {**_FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "mxfp8": {**_FP8, "quant_method": "mxfp8"},
    "channel": _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "tensor": _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "int4_rows": _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
}


@pytest.fixture(scope="module")
def weight() -> Tensor:
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    made[:64, :32] = 1e-3
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, weight: Tensor) -> Path:
    """All cases in one process of the engine's Python: importing SGLang is what takes time."""
    folder = tmp_path_factory.mktemp("reference")
    save_file({"weight": weight}, folder / "weights.safetensors")
    (folder / "cases.json").write_text(json.dumps(CASES))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "actors" / "engine" / "cpu_shim")}
    script = Path(__file__).with_name("quantised_reference.py")
    command = [engine_python(EngineConfig()), script, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def stored(name: str, weight: Tensor) -> dict[str, Tensor]:
    made = Quantisation.of(CASES[name]).tensors([(f"{NAME}weight", weight)])
    return {one.removeprefix(NAME): tensor for one, tensor in made}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sglang_has_a_parameter_for_each(name: str, reference: Path, weight: Tensor) -> None:
    wanted = json.loads((reference / "parameters.json").read_text())[name]
    found = stored(name, weight)
    assert {one: [str(tensor.dtype)[6:], list(tensor.shape)] for one, tensor in found.items()} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one["quant_method"] == "compressed-tensors"])
def test_compressed_tensors_stores_the_same_bits(name: str, reference: Path, weight: Tensor) -> None:
    wanted, found = load_file(reference / f"{name}.safetensors"), stored(name, weight)
    assert found.keys() == wanted.keys()
    for one, tensor in wanted.items():
        assert (found[one].dtype, found[one].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[one].view(torch.uint8), tensor.view(torch.uint8)), one
