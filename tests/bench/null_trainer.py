"""The trainer actor without torch: plans, ledger, bodies, cursor, checkpoints and trimming are the product's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from physarum.actors.trainer.actor import TrainerActor
from physarum.actors.trainer.batch import StepResult, TrainSequence
from physarum.actors.trainer.world import World

_STATE = "state"


class NullWorld:
    """Stands where the Megatron world does: takes a batch and does nothing with it."""

    def step(
        self, sequences: Sequence[TrainSequence], lr: float | None = None, number: int | None = None
    ) -> StepResult:
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return StepResult(
            loss=0.0, grad_norm=0.0, tokens_trained=tokens, sequences=len(sequences), metrics={}, seconds=0.0
        )

    def export(self) -> Iterator[Any]:
        return iter(())

    def begin_save(self, folder: Path) -> Callable[[float], None]:
        (folder / _STATE).write_bytes(b"")
        return lambda timeout_s: None

    def load(self, folder: Path) -> None:
        (folder / _STATE).read_bytes()

    def save_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class NullTrainer(TrainerActor):
    """Role trainer over a NullWorld."""

    async def _world(self, model: Path) -> World:
        return cast(World, NullWorld())
