"""Several ranks equal one; a rank that dies or hangs becomes a named error, never a silent wait."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

import physarum
from physarum.actors.trainer.batch import StepResult, TrainSequence
from physarum.actors.trainer.errors import (
    NonFiniteStep,
    RankFailed,
    StateMismatch,
    StateNotWritten,
    WorldClosed,
    WorldStartError,
)
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(120)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]

VOCABULARY = 127
"""Odd: two vocabulary shards need a padded column."""


class Alone(msgspec.Struct):
    """What one rank computes; the yardstick of every world below."""

    config: WorldConfig
    batch: list[TrainSequence]
    logprobs: list[np.ndarray]
    result: StepResult
    second: StepResult
    weights: dict[str, torch.Tensor]
    start_weights: dict[str, torch.Tensor]
    state: Path
    """In torch_dist, between the two steps."""


@pytest.fixture(scope="module")
def alone(model_folder: Folder, make_batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = model_folder(head_dim=24, kv_heads=2, vocabulary=VOCABULARY)
    config = WorldConfig(hf_folder=str(folder), lr=1e-3, eps=1e-3, tokens_per_microbatch=80, timeout_s=30.0)
    batch = make_batch(vocabulary=VOCABULARY)
    world = World.start(msgspec.structs.replace(config, checkpoint_format="torch_dist"))
    start_weights = {name: tensor.clone() for name, tensor in world.export()}
    logprobs = world.logprobs(batch)
    result, state = world.step(batch), tmp_path_factory.mktemp("state")
    world.save(state)
    second = world.step(batch)
    weights = {name: tensor.clone() for name, tensor in world.export()}
    world.close()
    return Alone(config, batch, logprobs, result, second, weights, start_weights, state)


KINDS = {
    "dp2": {"ranks": 2},
    "dp2-sharded-optimizer": {"ranks": 2, "megatron": {"use_distributed_optimizer": True}},
    "tp2": {"ranks": 2, "tp": 2},  # without sequence parallelism: test_megatron_parallel.py, slow
}


@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.slow) if one != "tp2" else one for one in KINDS])
def test_two_ranks_equal_one(alone: Alone, tmp_path: Path, kind: str) -> None:
    """One spawn, all checks: log-probabilities, export, two steps, refusal, save and load, and the one rank's state."""
    world = World.start(msgspec.structs.replace(alone.config, **KINDS[kind]))
    try:
        _same_start(world, alone)
        first = world.step(alone.batch)
        _close_to(first, alone.result)
        (tmp_path / "half" / "rng-0001.safetensors").mkdir(parents=True)
        with pytest.raises(StateNotWritten, match="rank 1: StateNotWritten"):
            world.save(tmp_path / "half")  # one rank only fails: nothing changed, the world goes on
        written = world.begin_save(tmp_path)
        second = world.step(alone.batch)  # while both ranks write
        written(30)
        _close_to(second, alone.second)
        for name, tensor in world.export():
            torch.testing.assert_close(tensor, alone.weights[name], rtol=1e-4, atol=1e-5, msg=name)
        with pytest.raises(NonFiniteStep):
            world.step([msgspec.structs.replace(alone.batch[0], advantage=float("nan")), *alone.batch[1:]])
        with pytest.raises(StateMismatch):
            world.load(tmp_path / "absent")
        world.load(tmp_path)
        repeated = world.step(alone.batch)
        assert (repeated.loss, repeated.grad_norm) == (second.loss, second.grad_norm)
        world.load(alone.state)
        _close_to(world.step(alone.batch), alone.second)
    finally:
        world.close()


def _same_start(world: World, alone: Alone) -> None:
    for measured, expected in zip(world.logprobs(alone.batch), alone.logprobs, strict=True):
        np.testing.assert_allclose(measured, expected, atol=1e-5)
    export = world.export()
    next(export)  # an abandoned export holds nobody up
    exported = dict(world.export())
    assert exported.keys() == alone.start_weights.keys()
    assert all(torch.equal(tensor, alone.start_weights[name]) for name, tensor in exported.items())


def _close_to(result: StepResult, expected: StepResult) -> None:
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.tokens_trained == expected.tokens_trained
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


@pytest.fixture
def pair(alone: Alone, request: pytest.FixtureRequest) -> Iterator[tuple[World, psutil.Process]]:
    """A world of two ranks (as parametrized, else data-parallel) with a short deadline, and the process of rank 1."""
    shape = getattr(request, "param", {})
    world = World.start(msgspec.structs.replace(alone.config, ranks=2, timeout_s=4.0, **shape))
    (child,) = (p for p in psutil.Process().children() if "physarum.actors.trainer.rank" in " ".join(p.cmdline()))
    yield world, child
    world.close()


def test_a_killed_rank_is_named_and_the_world_is_over(alone: Alone, pair: tuple[World, psutil.Process]) -> None:
    world, child = pair
    os.kill(child.pid, signal.SIGKILL)  # not waited for here: the world reaps its own children
    with pytest.raises(RankFailed, match="rank 1 ended with code -9"):
        world.step(alone.batch)
    with pytest.raises(WorldClosed):
        world.step(alone.batch)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param({}, id="dp"),
        pytest.param({"pp": 2}, id="pp", marks=pytest.mark.slow),
        pytest.param({"cp": 2}, id="cp", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_a_hanging_rank_is_an_error_within_the_deadline(alone: Alone, pair: tuple[World, psutil.Process]) -> None:
    world, child = pair
    os.kill(child.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RankFailed, match="no rank has ended"):
        world.step(alone.batch)
    assert time.monotonic() - started < 20.0
    assert not child.is_running()


@pytest.mark.slow
def test_an_idle_world_outlives_its_deadline(alone: Alone, pair: tuple[World, psutil.Process]) -> None:
    """The deadline bounds answers, not the caller's pauses: gloo would otherwise end idle ranks."""
    world, child = pair
    with pytest.raises(psutil.TimeoutExpired):
        child.wait(timeout=world.config.timeout_s + 1.0)
    assert world.step(alone.batch[:1]).sequences == 1  # fewer sequences than ranks: one has an empty microbatch


def test_a_rank_that_cannot_start_is_named(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(WorldStartError, match="rank 1 ended with exit code 1 before it joined"):
        World.start(msgspec.structs.replace(alone.config, ranks=2))


@pytest.mark.slow
def test_ranks_die_with_a_killed_parent(alone: Alone) -> None:
    script = (
        "import sys, msgspec; from physarum.actors.trainer.world import World, WorldConfig\n"
        "world = World.start(msgspec.json.decode(sys.stdin.readline(), type=WorldConfig))\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(physarum.__file__).absolute().parents[1])}
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(msgspec.json.encode(msgspec.structs.replace(alone.config, ranks=2)) + b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"ready\n"
        (rank,) = psutil.Process(parent.pid).children()
        parent.kill()
    rank.wait(timeout=10)  # an orphan would hold its device
