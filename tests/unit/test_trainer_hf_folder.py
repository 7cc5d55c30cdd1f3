"""The exported folder: shards, index, and what is copied from the start model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.weightsync.layout import Form, forms_in
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.presets import PRESETS, preset
from physarum.weightsync.quantisation.reading import Dequantised, folder_tensors

TENSORS = {"a": torch.arange(4.0), "b": torch.ones(4), "c": torch.zeros(8)}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("stale")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    return folder


def test_one_file_when_it_fits(start: Path, tmp_path: Path) -> None:
    write_hf_folder(start, tmp_path / "out", TENSORS.items())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": "float32"}


def test_shards_are_numbered_and_indexed(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("physarum.actors.trainer.hf_folder.SHARD_BYTES", 32)
    write_hf_folder(start, tmp_path / "out", TENSORS.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 64}
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], TENSORS[name])


def test_a_quantised_folder_says_how_and_a_plain_one_does_not(start: Path, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(8, 32), "model.layers.0.mlp.up_proj.weight": torch.ones(8, 32)}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    for name in PRESETS:
        write_hf_folder(start, tmp_path / name, tensors.items(), preset(name))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config == {"model_type": "qwen3", "dtype": "bfloat16", "quantization_config": PRESETS[name]}
        found = Quantisation.in_folder(tmp_path / name)
        stored = dict(folder_tensors(tmp_path / name))
        for one, exact in tensors.items():
            again = Dequantised(found, stored.keys(), stored.__getitem__).weight(one)
            assert torch.allclose(again.float(), exact.float(), rtol=0.08)
    write_hf_folder(tmp_path / "fp8", tmp_path / "plain", tensors.items())
    assert Quantisation.in_folder(tmp_path / "plain") is None
    assert forms_in(tmp_path / "plain")["model.layers.0.mlp.up_proj.weight"] == Form("bfloat16", (8, 32))


def test_the_type_named_is_that_of_most_bytes(start: Path, tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(16, dtype=torch.bfloat16), "correction": torch.ones(4)}
    write_hf_folder(start, tmp_path / "out", tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
