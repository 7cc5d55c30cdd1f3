"""A run goes on with the optimizer of a Megatron folder: the next step is the one that would have followed there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from test_megatron_parallel import started

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import StateMismatch
from physarum.actors.trainer.megatron.common_state import optimizer_steps
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(120)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]


class Unknown:
    """Of a program that is not installed here; loading it as a pickle would call this."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("the file ran something")


def common(folder: Path, steps: int | None) -> None:
    """As Megatron-LM writes it: settings of its own classes beside the optimizer's groups."""
    unknown = Unknown()
    unknown.note = "state"  # type: ignore[attr-defined]
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]} | ({"step": steps} if steps is not None else {})
    tree = {
        "args": argparse.Namespace(hidden_size=64, other=unknown),
        "optimizer": {"optimizer": {"param_groups": [group, dict(group)]}, "grad_scaler": {"scale": torch.ones(1)}},
        "iteration": 7,
    }
    torch.save(tree, folder / "common.pt")


def trained(config: WorldConfig, batches: list[list[TrainSequence]], folder: Path) -> tuple[float, float]:
    """A run of two steps, its model in `hf` and its state in `state` as others write it; (loss, norm) of its third step."""
    with started(config) as world:
        for one in batches[:2]:
            world.step(one)
        world.save_hf(folder / "hf")
        world.save(folder / "state")
        result = world.step(batches[2])
    for name in ("training.msgpack", "training.safetensors"):
        (folder / "state" / name).unlink()
    common(folder / "state", 2)
    return result.loss, result.grad_norm


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"megatron": {"use_distributed_optimizer": True}, "dtype": "bfloat16"}]
)
def test_the_next_step_is_the_one_that_would_have_followed(
    model_folder: Folder, make_batch: Batch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = WorldConfig(hf_folder=str(model_folder()), lr=1e-3, checkpoint_format="torch_dist", **settings)
    expected = trained(config, [make_batch(seed=seed) for seed in range(3)], tmp_path)
    with started(WorldConfig(hf_folder=str(tmp_path / "hf"), lr=1e-3, **settings)) as world:
        assert world.load_optimizer(tmp_path / "state") == 2
        result = world.step(make_batch(seed=2))
        assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=1e-6)
        assert world._worker.optimizer.steps == 3
        after = dict(world.export())
    with started(config) as world:  # what it is compared with: the same three steps in one
        for seed in range(3):
            world.step(make_batch(seed=seed))
        for name, tensor in world.export():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, msg=name)


def test_what_cannot_be_taken_is_refused_before_anything_changes(
    model_folder: Folder, make_batch: Batch, tmp_path: Path
) -> None:
    config = WorldConfig(hf_folder=str(model_folder()), lr=1e-3, checkpoint_format="torch_dist")
    trained(config, [make_batch(seed=seed) for seed in range(3)], tmp_path)
    with started(WorldConfig(hf_folder=str(model_folder()), lr=1e-3)) as world:
        with pytest.raises(StateMismatch, match="weights in .* are not the model's, first .*import-megatron"):
            world.load_optimizer(tmp_path / "state")
        common(tmp_path / "state", None)
        with pytest.raises(StateMismatch, match="trainer.optimizer_start.steps"):
            world.load_optimizer(tmp_path / "state")
        _weights_alone(world, tmp_path / "weights")
        with pytest.raises(StateMismatch, match="optimizer.state.exp_avg.* found None"):
            world.load_optimizer(tmp_path / "weights", 2)
        assert world._worker.optimizer.steps == 0
        assert world.step(make_batch()).sequences == 12


def _weights_alone(world: World, folder: Path) -> None:
    folder.mkdir()
    world.save_weights(folder)


def test_a_pickle_tells_the_steps_and_runs_nothing(tmp_path: Path) -> None:
    assert optimizer_steps(tmp_path) is None
    common(tmp_path, 41)
    assert optimizer_steps(tmp_path) == 41
    common(tmp_path, None)
    assert optimizer_steps(tmp_path) is None
    (tmp_path / "common.pt").write_bytes(b"no archive")
    assert optimizer_steps(tmp_path) is None


@pytest.mark.slow
def test_what_megatron_itself_saved_goes_on(model_folder: Folder, make_batch: Batch, tmp_path: Path) -> None:
    """Its optimizer's own sharded state and its writer, which starts a process."""
    config = WorldConfig(hf_folder=str(model_folder()), lr=1e-3, dtype="bfloat16")
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    with started(config) as world:
        for seed in range(2):
            world.step(make_batch(seed=seed))
        world.save_hf(tmp_path / "hf")
        worker = world._worker
        model = worker.model.module.sharded_state_dict()
        state = {"optimizer": worker.optimizer.megatron.sharded_state_dict(model), "checkpoint_version": 3.0}
        dist_checkpointing.save(model | state, str(folder), async_strategy="mcore")
        expected = world.step(make_batch(seed=2))
    with started(WorldConfig(hf_folder=str(tmp_path / "hf"), lr=1e-3, dtype="bfloat16")) as world:
        world.load_optimizer(folder, 2)
        result = world.step(make_batch(seed=2))
    assert (result.loss, result.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-6)
