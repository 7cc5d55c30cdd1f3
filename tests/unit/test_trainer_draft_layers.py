"""Draft layers of a folder are found whatever its files are like, and read as they are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from physarum.actors.trainer.draft_layers import DraftLayers
from physarum.actors.trainer.errors import UnsupportedModel
from physarum.weightsync.quantisation.presets import PRESETS, preset

CONFIG = LlamaConfig(num_hidden_layers=3)
TRAINED = {"model.layers.2.norm.weight": torch.ones(2), "model.embed_tokens.weight": torch.ones(2, 2)}
DRAFTS = {
    "model.layers.3.enorm.weight": torch.arange(3, dtype=torch.bfloat16),
    "model.layers.10.eh_proj.weight": torch.arange(4.0).reshape(2, 2),
}


def check(folder: Path) -> None:
    found = dict(DraftLayers(folder, CONFIG).tensors())
    assert found.keys() == DRAFTS.keys()
    assert all(one.dtype == DRAFTS[name].dtype and torch.equal(one, DRAFTS[name]) for name, one in found.items())


@pytest.fixture(autouse=True)
def config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_file(TRAINED | DRAFTS, tmp_path / "model.safetensors")
    check(tmp_path)


def test_only_files_that_an_index_names_are_read(tmp_path: Path) -> None:
    save_file(TRAINED, tmp_path / "a.safetensors")
    save_file(DRAFTS, tmp_path / "b.safetensors")
    (tmp_path / "stale.safetensors").write_bytes(b"left by something else")
    weight_map = dict.fromkeys(TRAINED, "a.safetensors") | dict.fromkeys(DRAFTS, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_quantised_ones_are_read_as_they_were(tmp_path: Path, name: str) -> None:
    drafts = {
        "model.layers.3.mlp.up_proj.weight": torch.full((64, 128), 0.5, dtype=torch.bfloat16),
        "model.layers.3.enorm.weight": torch.ones(3, dtype=torch.bfloat16),
    }
    save_file(dict(preset(name).tensors((TRAINED | drafts).items())), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PRESETS[name]}))
    layers = DraftLayers(tmp_path, CONFIG)
    found = dict(layers.tensors())
    assert found.keys() == drafts.keys()
    assert all(torch.allclose(one.float(), drafts[name].float(), rtol=0.07) for name, one in found.items())
    parts = [part for rank in range(3) for part, _ in layers.tensors(rank, 3)]
    assert sorted(parts) == sorted(drafts)


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    save_file(TRAINED, tmp_path / "model.safetensors")
    assert not list(DraftLayers(tmp_path, CONFIG).tensors())


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{broken")
    with pytest.raises(UnsupportedModel, match=f"{tmp_path.name}: weights are missing or unreadable"):
        DraftLayers(tmp_path, CONFIG)
