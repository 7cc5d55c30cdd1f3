"""Which tensors a quantization_config means, and what of it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from physarum.weightsync.errors import QuantisationError
from physarum.weightsync.quantisation.fp8 import Blocks, Scaled
from physarum.weightsync.quantisation.int4 import Packed
from physarum.weightsync.quantisation.mxfp8 import Mx
from physarum.weightsync.quantisation.plan import Quantisation, options_in
from physarum.weightsync.quantisation.presets import PRESETS, preset
from physarum.weightsync.quantisation.reading import Dequantised

LAYER = "model.layers.1."
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(weights: dict[str, Any], **options: Any) -> dict[str, Any]:
    group = {"targets": options.pop("targets", ["Linear"]), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **options}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
MODEL = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.q_proj.bias": (32,),
    "model.layers.0.mlp.gate.weight": (4, 32),
    "model.layers.0.mlp.gate_proj.weight": (16, 32),
    "model.layers.0.mlp.experts.2.up_proj.weight": (16, 32),
    "lm_head.weight": (64, 32),
}


@pytest.mark.parametrize("options", [FP8, compressed(INT4, format="pack-quantized"), PRESETS["fp8"], PRESETS["int4"]])
def test_only_linear_layers_are_quantised_in_the_order_of_the_model(options: dict[str, Any]) -> None:
    named = [(name, torch.randn(shape)) for name, shape in MODEL.items()]
    out = list(Quantisation.of(options).tensors(named))
    plain = [name for name, tensor in out if tensor.dtype is torch.float32 and "scale" not in name]
    assert plain == [
        name for name in MODEL if not name.endswith(("q_proj.weight", "gate_proj.weight", "up_proj.weight"))
    ]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in out))
    assert modules == list(dict.fromkeys(name.rpartition(".")[0] for name in MODEL))


def test_one_tensor_is_taken_at_a_time() -> None:
    taken: list[str] = []

    def named() -> Any:
        for name, shape in MODEL.items():
            taken.append(name)
            yield name, torch.zeros(shape)

    stream = preset("fp8").tensors(named())
    for name, _ in stream:
        assert taken[-1].rpartition(".")[0] == name.rpartition(".")[0]


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        (FP8, Blocks(128, 128)),
        ({**FP8, "scale_fmt": "ue8m0", "fmt": "e4m3"}, Blocks(128, 128, power_of_two=True)),
        ({**FP8, "weight_block_size": None}, Scaled()),
        ({"quant_method": "mxfp8", "activation_scheme": "dynamic"}, Mx()),
        (compressed(INT4, format="pack-quantized"), Packed(32)),
        (compressed({**INT4, "strategy": "channel", "group_size": None}, format="pack-quantized"), Packed(None)),
        (compressed(FLOAT8, format="float-quantized"), Scaled(each_row=True)),
        (compressed({**FLOAT8, "strategy": "tensor"}, format="naive-quantized"), Scaled(scale_shape=(1,))),
        (
            compressed({**FLOAT8, "strategy": "block", "block_structure": [128, 64]}, format="float-quantized"),
            Blocks(128, 64, scale="weight_scale"),
        ),
    ],
)
def test_each_form_that_engines_load(options: dict[str, Any], scheme: object) -> None:
    assert Quantisation.of(options).scheme_of(LAYER + "mlp.down_proj.weight") == scheme


@pytest.mark.parametrize(
    ("entry", "name", "skipped"),
    [
        ("model.layers.1", LAYER + "mlp.up_proj", True),
        ("layers.1", LAYER + "mlp.up_proj", True),
        ("model.layers.1.mlp", LAYER + "mlp.up_proj", True),
        ("mlp.up_proj", LAYER + "mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.gate", LAYER + "mlp.gate_proj", False),
        ("up_proj", LAYER + "mlp.experts.7.up_proj", False),
        ("model.layers.1.mlp.experts", LAYER + "mlp.experts.7.up_proj", True),
        ("model.layers.1.mlp.experts.0.up_proj", LAYER + "mlp.experts.7.down_proj", True),
    ],
)
@pytest.mark.parametrize("option", ["modules_to_not_convert", "ignored_layers"])
def test_fp8_skips_parts_of_paths(option: str, entry: str, name: str, skipped: bool) -> None:
    plan = Quantisation.of({**FP8, option: [entry]})
    assert (plan.scheme_of(f"{name}.weight") is None) == skipped


@pytest.mark.parametrize(
    ("entry", "name", "skipped"),
    [
        (LAYER + "mlp.up_proj", LAYER + "mlp.up_proj", True),
        ("mlp.up_proj", LAYER + "mlp.up_proj", True),
        (LAYER + "mlp", LAYER + "mlp.up_proj", False),
        (r"re:.*self_attn.*", LAYER + "self_attn.q_proj", True),
        (r"re:self_attn", LAYER + "self_attn.q_proj", False),
        (r"re:.*\.experts\.\d+\.up_proj$", LAYER + "mlp.experts.7.up_proj", True),
    ],
)
def test_compressed_tensors_ignores_names_ends_and_patterns(entry: str, name: str, skipped: bool) -> None:
    plan = Quantisation.of(compressed(INT4, format="pack-quantized", ignore=[entry]))
    assert (plan.scheme_of(f"{name}.weight") is None) == skipped


def test_a_name_goes_before_a_class_and_the_head_needs_a_name() -> None:
    options = compressed(INT4, format="mixed-precision", ignore=[])
    options["config_groups"]["group_0"]["format"] = "pack-quantized"
    options["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj$", "lm_head"],
        "weights": FLOAT8,
        "format": "float-quantized",
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
    }
    plan = Quantisation.of(options)
    assert plan.scheme_of(LAYER + "mlp.up_proj.weight") == Packed(32)
    assert plan.scheme_of(LAYER + "mlp.down_proj.weight") == Scaled(each_row=True)
    assert plan.scheme_of("lm_head.weight") == Scaled(each_row=True)
    del options["config_groups"]["group_1"]
    assert Quantisation.of(options).scheme_of("lm_head.weight") is None


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"quant_method": "awq"}, "quant_method: 'awq'"),
        ({}, "quant_method: None"),
        ({"quant_method": "modelopt_fp4"}, r"(?s)modelopt_fp4.*NVFP4 and MXFP4 are not made here"),
        ({**FP8, "activation_scheme": "static"}, r"(?s)activation_scheme: 'static'.*use dynamic"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size: \[128\]"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size: \[0, 128\]"),
        ({**FP8, "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({**FP8, "kv_cache_quant_algo": "FP8"}, r"(?s)kv_cache_quant_algo.*not known here"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 16]}, "groups of 32"),
        (compressed({**INT4, "symmetric": False}, format="pack-quantized"), r"weights\.symmetric: False"),
        (compressed({**INT4, "actorder": "group"}, format="pack-quantized"), "actorder: 'group'"),
        (compressed({**INT4, "num_bits": 8}, format="pack-quantized"), "type: int with num_bits: 8"),
        (compressed({**INT4, "group_size": 12}, format="pack-quantized"), "a multiple of 8"),
        (compressed(INT4, format="marlin-24"), "group_0.format: 'marlin-24'"),
        (
            compressed({**FLOAT8, "num_bits": 4}, format="nvfp4-pack-quantized"),
            r"(?s)num_bits: 4.*NVFP4 needs one global",
        ),
        (compressed({**FLOAT8, "group_size": 32, "strategy": "group"}), "strategy: 'group'|format: None"),
        (compressed(INT4, format="pack-quantized", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(INT4, format="pack-quantized", ignore=["re:("]), "regular expression"),
        ({"quant_method": "compressed-tensors"}, "config_groups: None"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(options: dict[str, Any], found: str) -> None:
    with pytest.raises(QuantisationError, match=found) as caught:
        Quantisation.of(options)
    assert "supported are fp8" in str(caught.value)


def test_static_activations_are_refused() -> None:
    options = compressed(FLOAT8, format="float-quantized")
    options["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    with pytest.raises(QuantisationError, match="input_activations that are not dynamic"):
        Quantisation.of(options)


@pytest.mark.parametrize("options", [PRESETS["int4"], {"quant_method": "mxfp8", "activation_scheme": "dynamic"}])
def test_a_shape_without_whole_groups_is_refused_by_name(options: dict[str, Any]) -> None:
    named = [(LAYER + "mlp.up_proj.weight", torch.ones(4, 40))]
    with pytest.raises(
        QuantisationError, match=r"up_proj\.weight has shape \(4, 40\), its scheme needs inputs divisible by 32"
    ):
        list(Quantisation.of(options).tensors(named))


def test_an_empty_weight_is_refused() -> None:
    with pytest.raises(QuantisationError, match="not empty"):
        list(preset("fp8").tensors([(LAYER + "mlp.up_proj.weight", torch.ones(0, 128))]))


def test_folders_without_a_quantization_config_have_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": null}')
    assert Quantisation.in_folder(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": PRESETS["int4"]}))
    found = Quantisation.in_folder(tmp_path)
    assert found is not None and found.options == PRESETS["int4"]
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(QuantisationError, match=r"config\.json: quantization_config has quant_method: 'gptq'"):
        Quantisation.in_folder(tmp_path)
    with pytest.raises(QuantisationError, match="must be an object"):
        options_in({"quantization_config": "fp8"})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_trainer_reads_what_was_stored(name: str) -> None:
    plan = preset(name)
    weights = {one: torch.randn(shape) for one, shape in MODEL.items()}
    stored = dict(plan.tensors(weights.items()))
    reader = Dequantised(plan, stored.keys(), stored.__getitem__)
    for one, exact in weights.items():
        found = reader.weight(one)
        assert found.shape == exact.shape and found.dtype is torch.float32
        assert float((found - exact).abs().max()) <= 0.4
        assert torch.equal(found, exact) == (plan.scheme_of(one) is None or exact.ndim == 1)


def test_a_quantised_tensor_that_nothing_explains_is_refused() -> None:
    stored = dict(preset("fp8").tensors([(LAYER + "mlp.up_proj.weight", torch.ones(4, 4))]))
    with pytest.raises(QuantisationError, match="stored as torch.float8_e4m3fn"):
        Dequantised(None, stored.keys(), stored.__getitem__).weight(LAYER + "mlp.up_proj.weight")
    del stored[LAYER + "mlp.up_proj.weight_scale_inv"]
    with pytest.raises(QuantisationError, match="weight_scale_inv"):
        Dequantised(preset("fp8"), stored.keys(), stored.__getitem__).weight(LAYER + "mlp.up_proj.weight")
