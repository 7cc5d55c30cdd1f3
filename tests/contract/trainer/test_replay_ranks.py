"""Every way to cut a model with experts over ranks replays what one process replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replay_reference import (
    RECOMPUTED,
    Step,
    batch,
    load,
    others,
    routing_of,
    same,
    started,
    told,
    with_kept,
)

from physarum.actors.trainer.algorithm_settings import Replay
from physarum.actors.trainer.batch import Float32, TrainSequence
from physarum.actors.trainer.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SHAPES: dict[str, dict[str, Any]] = {
    "cp2": {"ranks": 2, "cp": 2},
    "pp2-recomputed": {"ranks": 2, "pp": 2, "megatron": RECOMPUTED},
    "dp2": {"ranks": 2},
    "tp2-sequence-parallel": {"ranks": 2, "tp": 2},
    "ep2": {"ranks": 2, "ep": 2},
    "tp2-ep2-etp1": {"ranks": 2, "tp": 2, "ep": 2, "etp": 1},
    "tp2-cp2": {"ranks": 4, "tp": 2, "cp": 2},
    "tp2-pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "pp2-ep2": {"ranks": 4, "pp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def alone(experts_folder: Path) -> tuple[list[TrainSequence], list[Float32], list[Step], list[Step]]:
    """A batch with both records; log-probabilities, and steps with R3 and with R2, of one process."""
    hf = load(experts_folder)
    sequences = told(with_kept(batch()), [others(routing_of(hf, one), keep=0.3) for one in batch()])
    with started(experts_folder, Replay(routing="R3", nucleus=True), minibatches=2) as world:
        logprobs = world.logprobs(sequences)
        engine = _steps(world, sequences)
    with started(experts_folder, Replay(routing="R2"), minibatches=2) as world:
        return sequences, logprobs, engine, _steps(world, sequences)


def _steps(world: World, sequences: list[TrainSequence]) -> list[Step]:
    """All sequences, the first alone (fewer than ranks), all again."""
    results = [world.step(part) for part in (sequences, sequences[:1], sequences)]
    return [(one.loss, one.grad_norm) for one in results]


@pytest.mark.parametrize("name", SHAPES)
def test_several_ranks_replay_as_one(experts_folder: Path, alone: Any, name: str) -> None:
    sequences, logprobs, engine, own = alone
    shape = SHAPES[name]
    with started(experts_folder, Replay(routing="R3", nucleus=True), minibatches=2, **shape) as world:
        same(world.logprobs(sequences), logprobs, 1e-5)
        _same_steps(_steps(world, sequences), engine)
    with started(experts_folder, Replay(routing="R2"), minibatches=2, **shape) as world:
        _same_steps(_steps(world, sequences), own)


def _same_steps(found: list[Step], expected: list[Step]) -> None:
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other_loss, abs=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)
