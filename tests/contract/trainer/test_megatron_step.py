"""One rank: independence of packing, refusals that leave the weights alone, exact resume, configuration."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import (
    BadSequence,
    EmptyBatch,
    ExportInterrupted,
    NonFiniteStep,
    SequenceTooLong,
    StateMismatch,
    StateNotWritten,
    UnknownMegatronField,
    UnsupportedModel,
    UnsupportedParallelism,
    WorldClosed,
    WorldStartError,
)
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(60)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]
Start = Callable[[WorldConfig], World]


@pytest.fixture
def start() -> Iterator[Start]:
    worlds: list[World] = []

    def begin(config: WorldConfig) -> World:
        for world in worlds:
            world.close()
        worlds.append(World.start(config))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.close()


def weights(world: World) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in world.export()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_loss_and_gradient_do_not_depend_on_the_microbatches(
    model_folder: Folder, make_batch: Batch, start: Start
) -> None:
    results = [
        start(WorldConfig(hf_folder=str(model_folder()), tokens_per_microbatch=budget)).step(make_batch(20))
        for budget in (40, 150, 4096)
    ]
    for result in results:
        assert result.loss == pytest.approx(results[-1].loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(results[-1].grad_norm, rel=1e-5)
        assert result.metrics == pytest.approx(results[-1].metrics, rel=1e-4, abs=1e-6)


def test_logits_in_chunks_give_the_same_step(
    model_folder: Folder, make_batch: Batch, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorldConfig(hf_folder=str(model_folder()))
    whole = start(config).step(make_batch())
    monkeypatch.setattr("physarum.actors.trainer.megatron.forward.LOGITS_CHUNK_BYTES", 4 * 128 * 10)
    chunked = start(config).step(make_batch())
    assert (chunked.loss, chunked.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=1e-5)


def test_resumed_run_is_bit_equal(model_folder: Folder, make_batch: Batch, start: Start, tmp_path: Path) -> None:
    config = WorldConfig(hf_folder=str(model_folder()), lr=1e-2, weight_decay=0.1, warmup_steps=3)
    world = start(config)
    straight = [world.step(make_batch(seed=seed)) for seed in range(3)]
    expected = weights(world)
    world = start(config)
    world.step(make_batch(seed=0))
    written = world.begin_save(tmp_path / "state")
    world.step(make_batch(seed=9))  # while it is written; and what is lost by going back
    written(30)
    world = start(config)
    world.load(tmp_path / "state")
    resumed = [world.step(make_batch(seed=seed)) for seed in (1, 2)]
    assert [(r.loss, r.grad_norm, r.metrics["lr"]) for r in resumed] == [
        (r.loss, r.grad_norm, r.metrics["lr"]) for r in straight[1:]
    ]
    assert same(weights(world), expected)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"megatron": {"use_distributed_optimizer": True}}])
def test_resumed_run_is_bit_equal_with_master_weights(
    model_folder: Folder, make_batch: Batch, start: Start, tmp_path: Path, settings: dict[str, object]
) -> None:
    config = WorldConfig(hf_folder=str(model_folder()), lr=1e-3, **settings)  # type: ignore[arg-type]
    world = start(config)
    world.step(make_batch(seed=0))
    written = world.begin_save(tmp_path)
    expected = world.step(make_batch(seed=1))  # while it is written
    exported = weights(world)
    written(30)
    world = start(config)
    world.load(tmp_path)
    resumed = world.step(make_batch(seed=1))
    assert (resumed.loss, resumed.grad_norm) == (expected.loss, expected.grad_norm)
    assert same(weights(world), exported)


def test_a_state_that_cannot_be_written_leaves_the_world_going(
    model_folder: Folder, make_batch: Batch, start: Start, tmp_path: Path
) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder())))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateNotWritten, match="cannot make folder"):
        world.save(tmp_path / "file")
    (tmp_path / "state" / "rng-0000.safetensors").mkdir(parents=True)
    with pytest.raises(StateNotWritten, match="'rng-0000' could not be written"):
        world.save(tmp_path / "state")
    assert world.step(make_batch()).sequences == 12


def test_state_of_another_model_is_refused(model_folder: Folder, start: Start, tmp_path: Path) -> None:
    start(WorldConfig(hf_folder=str(model_folder()))).save(tmp_path)
    world = start(WorldConfig(hf_folder=str(model_folder(head_dim=24))))
    before = weights(world)
    with pytest.raises(StateMismatch, match="belongs to another model"):
        world.load(tmp_path)
    with pytest.raises(StateMismatch, match="unreadable"):
        world.load(tmp_path / "absent")
    assert same(weights(world), before)


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(
    model_folder: Folder, make_batch: Batch, start: Start
) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder()), lr=1e-3))
    before = weights(world)
    good = make_batch()
    bad = [msgspec.structs.replace(good[0], advantage=float("inf")), *good[1:]]
    with pytest.raises(NonFiniteStep, match="over 12 sequences") as caught:
        world.step(bad)
    assert caught.value.metric == "loss"
    huge = [msgspec.structs.replace(sequence, advantage=1e30) for sequence in good]
    with pytest.raises(NonFiniteStep, match="grad_norm"):
        world.step(huge)
    assert same(weights(world), before)
    after_refusals = world.step(good)
    fresh = start(WorldConfig(hf_folder=str(model_folder()), lr=1e-3)).step(good)
    assert (after_refusals.loss, after_refusals.grad_norm) == (fresh.loss, fresh.grad_norm)


def test_batches_that_cannot_be_trained_are_named(model_folder: Folder, make_batch: Batch, start: Start) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder()), tokens_per_microbatch=20))
    good = next(sequence for sequence in make_batch() if sequence.length <= 20)
    masked = msgspec.structs.replace(good, loss_mask=np.zeros(good.response_len, np.bool_))
    with pytest.raises(EmptyBatch):
        world.step([masked])
    with pytest.raises(SequenceTooLong):
        world.step([sequence for sequence in make_batch() if sequence.length > 20])
    without = msgspec.structs.replace(good, engine_logprobs=np.full(good.response_len, np.nan, np.float32))
    with pytest.raises(BadSequence, match="without a valid engine log-probability"):
        world.step([without])
    foreign = msgspec.structs.replace(good, token_ids=np.full(good.length, 128, np.int32))
    with pytest.raises(BadSequence, match="token ids 128 to 128; expected 0 to 127"):
        world.step([foreign])
    assert world.step([good, masked]).sequences == 2


def test_warm_up_reaches_the_rate_and_an_override_replaces_it(
    model_folder: Folder, make_batch: Batch, start: Start
) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder()), lr=1e-3, warmup_steps=2))
    rates = [world.step(make_batch(), lr=lr).metrics["lr"] for lr in (None, None, None, 3e-4)]
    assert rates == [5e-4, 1e-3, 1e-3, 3e-4]


def test_an_export_does_not_mix_two_versions(model_folder: Folder, make_batch: Batch, start: Start) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder())))
    export = world.export()
    next(export)
    world.step(make_batch())
    with pytest.raises(ExportInterrupted, match="after 1 parameters"):
        list(export)


def test_settings_that_megatron_lacks_are_refused_before_anything_starts(model_folder: Folder, tmp_path: Path) -> None:
    folder = str(model_folder())
    with pytest.raises(UnknownMegatronField, match="did you mean recompute_granularity"):
        World.start(WorldConfig(hf_folder=folder, megatron={"recompute_granularty": "full"}))
    with pytest.raises(UnknownMegatronField, match="set that instead"):
        World.start(WorldConfig(hf_folder=folder, megatron={"bf16": True}))
    with pytest.raises(UnknownMegatronField, match="overlap_param_gather is not available"):
        World.start(WorldConfig(hf_folder=folder, megatron={"overlap_param_gather": True}))
    with pytest.raises(UnknownMegatronField, match="hidden_dropout is 'much'"):
        World.start(WorldConfig(hf_folder=folder, megatron={"hidden_dropout": "much"}))
    with pytest.raises(UnsupportedParallelism, match="3 ranks do not divide"):
        World.start(WorldConfig(hf_folder=folder, ranks=3, tp=2))
    with pytest.raises(UnsupportedParallelism, match=r"pp 2 \* cp 1 = 2; make ranks a multiple"):
        World.start(WorldConfig(hf_folder=folder, pp=2))
    with pytest.raises(UnsupportedParallelism, match="num_hidden_layers 2 does not divide by pp 4"):
        World.start(WorldConfig(hf_folder=folder, ranks=4, pp=4))
    with pytest.raises(UnsupportedParallelism, match="a qwen3 model has no experts"):
        World.start(WorldConfig(hf_folder=folder, ranks=2, ep=2))
    with pytest.raises(UnknownMegatronField, match=r"megatron\.virtual_pipeline_model_parallel_size is not available"):
        World.start(WorldConfig(hf_folder=folder, megatron={"virtual_pipeline_model_parallel_size": 2}))
    with pytest.raises(UnsupportedModel, match=r"config\.json is missing"):
        World.start(WorldConfig(hf_folder=str(tmp_path)))


def test_a_port_in_use_is_named(model_folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorldStartError, match=f"master_port {port}"):
            World.start(WorldConfig(hf_folder=str(model_folder()), master_port=port))


def test_full_recomputation_gives_the_same_step(model_folder: Folder, make_batch: Batch, start: Start) -> None:
    plain = start(WorldConfig(hf_folder=str(model_folder()))).step(make_batch())
    megatron = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = start(WorldConfig(hf_folder=str(model_folder()), megatron=megatron)).step(make_batch())
    assert (recomputed.loss, recomputed.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-6)


def test_a_closed_world_says_so(model_folder: Folder, make_batch: Batch, start: Start) -> None:
    world = start(WorldConfig(hf_folder=str(model_folder())))
    world.close()
    world.close()
    with pytest.raises(WorldClosed):
        world.step(make_batch())
