"""Training state in torch_dist: bit-equal where nothing changes, and read by worlds of another shape or optimizer.

Shapes are slow here; test_megatron_ranks.py goes on from one rank's state with two, in the quick suite.
"""

import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from test_megatron_parallel import ALGORITHM, MODELS, _same, _save_model, batch, started

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import StateMismatch, StateNotWritten, UnknownMegatronField
from physarum.actors.trainer.megatron import torch_dist
from physarum.actors.trainer.megatron.torch_dist import Reader, is_torch_dist
from physarum.actors.trainer.world import World, WorldConfig
from physarum.bus import room

pytestmark = pytest.mark.timeout(240)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]
Start = Callable[[WorldConfig], World]

SHARDED = {"megatron": {"use_distributed_optimizer": True}}


@pytest.fixture
def start() -> Iterator[Start]:
    """One world at a time."""
    running: list[World] = []

    def begin(config: WorldConfig) -> World:
        for world in running:
            world.close()
        running.append(World.start(config))
        return running[-1]

    yield begin
    for world in running:
        world.close()


@pytest.fixture
def config(model_folder: Folder) -> WorldConfig:
    return WorldConfig(hf_folder=str(model_folder()), lr=1e-3, warmup_steps=3, checkpoint_format="torch_dist")


def changed(config: WorldConfig, **changes: Any) -> WorldConfig:
    return msgspec.structs.replace(config, **changes)


def weights(world: World) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in world.export()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [({}, {}), (SHARDED, SHARDED), ({}, SHARDED), (SHARDED, {})])
def test_resumed_run_is_bit_equal_whoever_holds_the_moments(
    config: WorldConfig, make_batch: Batch, start: Start, tmp_path: Path, before: Any, after: Any, dtype: str
) -> None:
    config = changed(config, dtype=dtype, clip_grad=0.0)
    world = start(changed(config, **before))
    world.step(make_batch(seed=0))
    written = world.begin_save(tmp_path)
    drawn = torch.rand(3)
    expected = [world.step(make_batch(seed=seed)) for seed in (1, 2)]  # while it is written
    written(30)
    exported = weights(world)
    world = start(changed(config, **after))
    world.load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    resumed = [world.step(make_batch(seed=seed)) for seed in (1, 2)]
    # The norm itself is summed in another order by a sharded optimizer; nothing is clipped by it here.
    assert [(one.loss, one.metrics["lr"]) for one in resumed] == [(one.loss, one.metrics["lr"]) for one in expected]
    assert before != after or [one.grad_norm for one in resumed] == [one.grad_norm for one in expected]
    assert equal(weights(world), exported)


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "sgd"}])
def test_a_state_before_the_first_step_is_one_too(
    config: WorldConfig, make_batch: Batch, start: Start, tmp_path: Path, optimizer: dict[str, str]
) -> None:
    config = changed(config, megatron=optimizer)
    expected = start(config).step(make_batch())
    world = start(config)
    world.save(tmp_path)
    world.step(make_batch(seed=3))
    world.load(tmp_path)
    found = world.step(make_batch())
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)


def test_megatron_itself_reads_it_and_no_process_was_started(
    config: WorldConfig, make_batch: Batch, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(config)
    world.step(make_batch())
    before = {child.pid for child in psutil.Process().children()}  # other tests' fixtures
    monkeypatch.setattr(subprocess, "Popen", None)
    world.save(tmp_path)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert is_torch_dist(tmp_path)
    assert dist_checkpointing.load_common_state_dict(str(tmp_path))["checkpoint_version"] == 3.0
    found = dist_checkpointing.load_plain_tensors(str(tmp_path))
    exported = weights(world)
    assert torch.equal(found["embedding.word_embeddings.weight"], exported["model.embed_tokens.weight"])
    norm = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"  # as Transformer Engine's layers have it
    assert torch.equal(found[norm], exported["model.layers.1.input_layernorm.weight"])
    assert f"optimizer.state.exp_avg.{norm}" in found


def test_a_rank_that_ended_while_others_write_is_no_riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch_dist.checkpoint, "save", closed)
    with pytest.raises(
        StateNotWritten, match="lost each other .Connection closed by peer.* log of the rank that ended"
    ):
        torch_dist.write(tmp_path, {})


def test_files_of_ranks_are_read_after_the_form_was_changed(
    config: WorldConfig, make_batch: Batch, start: Start, tmp_path: Path
) -> None:
    world = start(changed(config, checkpoint_format="ranks"))
    world.step(make_batch())
    world.save(tmp_path)
    expected = world.step(make_batch(seed=1))
    world = start(config)
    world.load(tmp_path)
    assert world.step(make_batch(seed=1)).loss == expected.loss


def test_a_state_that_cannot_be_written_leaves_the_world_going(
    config: WorldConfig, make_batch: Batch, start: Start, tmp_path: Path
) -> None:
    world = start(config)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateNotWritten, match="torch_dist state could not be written"):
        world.save(tmp_path / "file")
    (tmp_path / "state" / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(StateNotWritten, match="IsADirectoryError"):
        world.save(tmp_path / "state")
    assert world.step(make_batch()).sequences == 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("free_kib", [0, 4, 32, 300, 800])
def test_a_disk_that_is_full_at_some_write_is_called_full(
    config: WorldConfig, make_batch: Batch, start: Start, small_disk: Path, free_kib: int
) -> None:
    """The actor waits for room only where it is told that there is none; 1.4 MiB would be enough."""
    world = start(config)
    world.step(make_batch())
    (small_disk / "state").mkdir()
    (small_disk / "ballast").write_bytes(bytes((2048 - free_kib) << 10))
    with pytest.raises(StateNotWritten) as raised:
        world.save(small_disk / "state")
    assert room.is_full(raised.value)
    (small_disk / "ballast").unlink()
    world.save(small_disk / "state")


def test_state_of_another_model_or_dtype_is_refused(
    config: WorldConfig, model_folder: Folder, start: Start, tmp_path: Path
) -> None:
    start(config).save(tmp_path)
    world = start(changed(config, hf_folder=str(model_folder(head_dim=24))))
    before = weights(world)
    with pytest.raises(StateMismatch, match=r"tensors differ, first decoder.*found \(32,\), expected \(24,\)"):
        world.load(tmp_path)
    assert equal(weights(world), before)
    with pytest.raises(StateMismatch, match="torch.float32"):
        start(changed(config, dtype="bfloat16")).load(tmp_path)


@pytest.mark.parametrize("field", [{"optimizer": "muon"}, {"use_precision_aware_optimizer": True}])
def test_an_optimizer_that_it_would_not_hold_whole_is_refused_at_the_start(
    config: WorldConfig, field: dict[str, Any]
) -> None:
    with pytest.raises(UnknownMegatronField, match=r"not written in torch_dist.*checkpoint_format to ranks"):
        World.start(changed(config, megatron=field))


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize("content", [pickle.dumps(Harm()), pickle.dumps({"a": 1}), b"", b"\x80garbage"])
def test_a_pickle_that_is_no_checkpoint_is_refused_and_not_run(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(StateMismatch, match="metadata"):
        Reader(tmp_path).shapes()
    assert not (tmp_path / "harmed").exists()


ONE: dict[str, Any] = {}
TP2, PP2 = {"ranks": 2, "tp": 2}, {"ranks": 2, "pp": 2}
EP2, DP2 = {"ranks": 2, "ep": 2}, {"ranks": 2}
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one-to-tp2": ("tied", ONE, TP2),
    "tp2-to-one": ("untied", TP2, ONE),
    "one-to-pp2": ("tied", ONE, PP2),
    "pp2-to-tp2": ("tied", PP2, TP2),
    "one-to-ep2": ("moe", ONE, EP2),
    "ep2-sharded-to-one": ("moe", EP2 | SHARDED, ONE),
    "dp2-sharded-to-one": ("untied", DP2 | SHARDED, ONE),
    "one-to-dp2-sharded": ("tied", ONE, DP2 | SHARDED),
    "one-to-cp2": ("tied", ONE, {"ranks": 2, "cp": 2}),
    "dp2-sharded-to-tp2": ("untied", DP2 | SHARDED, TP2),
    "tp2-pp2-to-dp2-sharded": ("tied", {"ranks": 4, "tp": 2, "pp": 2}, DP2 | SHARDED),
    "tp2-ep2-etp1-to-pp2": ("moe", {"ranks": 2, "tp": 2, "ep": 2, "etp": 1}, PP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_policy_critic_and_moving_reference_go_on_in_another_shape(tmp_path: Path, name: str) -> None:
    model, before, after = SHAPES[name]
    _save_model(tmp_path / "model", **MODELS[model])
    config = WorldConfig(
        hf_folder=str(tmp_path / "model"), lr=1e-3, eps=1e-3, tokens_per_microbatch=200, timeout_s=60.0,
        algorithm=ALGORITHM, checkpoint_format="torch_dist",
    )  # fmt: skip
    with started(changed(config, **before)) as world:
        world.step(batch())
        world.save(tmp_path / "state")
        unbroken = [world.step(batch()) for _ in range(2)]
        world.load(tmp_path / "state")
        again = world.step(batch())
        assert (again.loss, again.grad_norm, again.metrics) == (
            unbroken[0].loss, unbroken[0].grad_norm, unbroken[0].metrics,
        )  # fmt: skip
    with started(changed(config, **after)) as world:
        world.load(tmp_path / "state")
        for expected in unbroken:
            _same(world.step(batch()), expected)


@pytest.mark.slow
def test_what_one_rank_cannot_write_is_refused_by_all_and_the_world_goes_on(
    config: WorldConfig, model_folder: Folder, make_batch: Batch, start: Start, tmp_path: Path
) -> None:
    world = start(changed(config, hf_folder=str(model_folder(head_dim=24, kv_heads=2)), **TP2))
    for name, file in (("data", "__1_0.distcp"), ("generators", "rng-0001.safetensors")):
        (tmp_path / name / file).mkdir(parents=True)
        with pytest.raises(StateNotWritten, match="rank 1"):
            world.save(tmp_path / name)
    world.save(tmp_path / "whole")
    expected = world.step(make_batch())
    world.load(tmp_path / "whole")
    assert world.step(make_batch()).loss == expected.loss
