"""Weights between Hugging Face folders, torch_dist folders of others, and training states."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from test_megatron_parallel import started
from typer.testing import CliRunner

from physarum.actors.actorctl.checkpoints import app
from physarum.actors.tools import hf_export
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import ConversionError, RunUnfitError
from physarum.actors.tools.hf_export import write_trained
from physarum.actors.tools.megatron_folders import import_hf, import_megatron
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.megatron import sharded_state, torch_dist
from physarum.actors.trainer.world import World, WorldConfig
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def module_of(world: World) -> Any:
    return world._worker.model.module


def other_weights(folder: Path, seed: int = 1) -> Callable[[World], None]:
    """Changes a world's weights, so that what is imported is not what the model folder held anyway."""

    def change(world: World) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in module_of(world).parameters():
                parameter.copy_(torch.randn_like(parameter))
        world.save_hf(folder)

    return change


def test_there_and_back_on_the_command_line(model_folder: Folder, tmp_path: Path) -> None:
    start = model_folder(head_dim=24, kv_heads=2, tied=False, vocabulary=127)
    runner = CliRunner()
    made = runner.invoke(app, ["import-hf", str(start), str(tmp_path / "megatron"), "--json"])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    command = ["import-megatron", str(tmp_path / "megatron"), "--model", str(start), "--out", str(tmp_path / "hf")]
    back = runner.invoke(app, [*command, "--json"])
    assert back.exit_code == 0, back.output
    assert json.loads(back.stdout)["left"] == []
    assert same(start, tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer_note.txt").is_file()
    again = runner.invoke(app, command)
    assert again.exit_code == 1
    assert "exists; expected a new folder" in again.stderr


@pytest.mark.parametrize("layout", [sharded_state.LAYOUT, {"non_homogeneous_layers": False}])
def test_folders_of_other_releases_and_of_transformer_engine_are_read(
    experts_folder: Path, tmp_path: Path, layout: dict[str, bool]
) -> None:
    """Layers numbered or as one tensor; the norm before experts alone, as Transformer Engine's layers have it."""
    iteration = tmp_path / "iter_0000007"
    with started(WorldConfig(hf_folder=str(experts_folder))) as world:
        other_weights(tmp_path / "expected")(world)
        named = sharded_state.weights(module_of(world), layout)
        fused, alone = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
        assert any(fused in leaf.key for leaf in named.values())
        named = {name: replace(leaf, key=leaf.key.replace(fused, alone)) for name, leaf in named.items()}
        torch_dist.write(iteration, torch_dist.taken(named, {"iteration": 7}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    found = import_megatron(tmp_path, experts_folder, tmp_path / "hf")
    assert (found.source, found.left) == (str(iteration), [])
    assert same(tmp_path / "expected", tmp_path / "hf")


@pytest.mark.slow
def test_what_megatron_itself_saved_is_read(model_folder: Folder, tmp_path: Path) -> None:
    """Its writer starts a process; its common state is pickled and is not read."""
    (tmp_path / "iter_0000001").mkdir()
    with started(WorldConfig(hf_folder=str(model_folder()))) as world:
        other_weights(tmp_path / "expected")(world)
        state = module_of(world).sharded_state_dict() | {"args": {"hidden_size": 64}, "checkpoint_version": 3.0}
        dist_checkpointing.save(state, str(tmp_path / "iter_0000001"), async_strategy="mcore")
    found = import_megatron(tmp_path / "iter_0000001", model_folder(), tmp_path / "hf")
    assert found.left == []
    assert same(tmp_path / "expected", tmp_path / "hf")


def test_what_is_not_taken_is_said(model_folder: Folder, make_batch: Batch, tmp_path: Path) -> None:
    with started(WorldConfig(hf_folder=str(model_folder()), lr=1e-3, checkpoint_format="torch_dist")) as world:
        world.step(make_batch())
        world.save(tmp_path / "state")
        world.save_hf(tmp_path / "expected")
    found = import_megatron(tmp_path / "state", model_folder(), tmp_path / "hf")
    (left,) = found.left
    assert (left.part, left.tensors > 20, "optimizer_start" in left.reason) == ("optimizer", True, True)
    assert left.first.startswith("optimizer.state.exp_avg.decoder.")
    assert same(tmp_path / "expected", tmp_path / "hf")


@pytest.mark.parametrize("form", ["ranks", "torch_dist"])
def test_a_training_state_becomes_a_model(model_folder: Folder, make_batch: Batch, tmp_path: Path, form: Any) -> None:
    with started(WorldConfig(hf_folder=str(model_folder()), lr=1e-3, checkpoint_format=form)) as world:
        world.step(make_batch())
        world.save(tmp_path / "state")
        world.save_hf(tmp_path / "expected")
    config = resolve("configs/quickstart.yaml", parse_command_line(["model.dtype=float32"]))
    write_trained(config, model_folder(), tmp_path / "state", tmp_path / "hf")
    assert same(tmp_path / "expected", tmp_path / "hf")


def test_what_does_not_fit_leaves_nothing(model_folder: Folder, tmp_path: Path) -> None:
    import_hf(model_folder(), tmp_path / "megatron")
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match="belongs to another model"):
        import_megatron(tmp_path / "megatron", model_folder(head_dim=24), out)
    with pytest.raises(ConversionError, match=r"latest_checkpointed_iteration\.txt"):
        import_megatron(tmp_path, model_folder(), out)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(ConversionError, match="iter_0000012, which .* names, is not in torch_dist"):
        import_megatron(tmp_path / "megatron", model_folder(), out)
    with pytest.raises(ConversionError, match=r"config\.json"):
        import_hf(tmp_path, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_a_place_that_takes_no_folder_is_named(model_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, model = tmp_path / "file" / "out", model_folder()
    run = cast(OpenRun, SimpleNamespace(name="mine", folder=SimpleNamespace(start_model=model)))
    with pytest.raises(RunUnfitError, match=r"in(to)? .*file .*a place to write"):
        hf_export._write(run, None, out, None)
    with pytest.raises(ConversionError, match=r"in(to)? .*file .*a place to write"):
        import_hf(model, out)
