"""One run of B1 or B2 in a process of its own: `python -m tests.bench.age_line SPEC.json`; prints what it measured.

Source, rollout, reward and trainer are the product's actors on a real server; SGLang and Megatron are the latency model. The
weights that make tokens follow LEDGER: a step that is recorded freezes the engines, then they go on with its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, cast
from unittest import mock

import msgspec

from physarum.actors.account import account, read_ledger, settled
from physarum.actors.reward.actor import RewardActor
from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.runtime import Actor
from physarum.actors.source.actor import SourceActor
from physarum.actors.source.admission import Disposals
from physarum.actors.trainer import actor as trainer_actor
from physarum.actors.trainer.actor import TrainerActor
from physarum.actors.trainer.batch import StepResult, TrainSequence
from physarum.actors.trainer.groups import Group
from physarum.actors.trainer.planner import Planner
from physarum.actors.trainer.world import World
from physarum.bus import ledger
from physarum.bus.ledger import Numbered, PlanRecord, RefillRecord, RollbackRecord, StepRecord
from physarum.bus.log import LogReader
from physarum.bus.version import Fork
from tests.bench import age_hooks
from tests.bench.age_measure import Measured, measured
from tests.bench.latency import Fleet, Model
from tests.bench.null_trainer import NullWorld
from tests.bench.stage import Stage, open_stage

RECIPE: Final = Path(__file__).with_name("age.yaml")
_RUN_S: Final = 1800.0


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """`policy`: ours (what `options` say), wait (by first tokens) or one_step_off; `options`: overrides of the recipe."""

    name: str
    k: int
    policy: str = "ours"
    options: list[str] = []
    engines: int = 8
    groups: int = 256
    devices: int = 1
    speedup: float = 20.0
    warm_steps: int = 8
    steps: int = 16

    @property
    def model(self) -> Model:
        return Model(engines=self.engines, groups=self.groups, devices=self.devices)


class ModelWorld(NullWorld):
    """A step takes as long as the model says."""

    model: ClassVar[Model]
    speedup: ClassVar[float]

    def step(
        self, sequences: Sequence[TrainSequence], lr: float | None = None, number: int | None = None
    ) -> StepResult:
        tokens = age_hooks.UNIT * sum(len(sequence.loss_mask) for sequence in sequences)
        seconds = self.model.train_s(tokens)
        time.sleep(seconds / self.speedup)
        trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return StepResult(
            loss=0.0,
            grad_norm=0.0,
            tokens_trained=trained,
            sequences=len(sequences),
            metrics={"model_train_s": seconds, "model_tokens": float(tokens)},
            seconds=seconds,
        )


class ModelTrainer(TrainerActor):
    """Role trainer over a ModelWorld."""

    async def _world(self, model: Path) -> World:
        return cast(World, ModelWorld())


class WaitingPlanner(Planner):
    """For comparison: no step begins that would leave a group behind whose first token would then be over the bound.

    It knows what no trainer does: which weights made the first token of each group that is still under way.
    """

    bound: ClassVar[int]
    _number = 0

    def settle(self, at_number: int, forks: tuple[Fork, ...], now: float = 0.0) -> list[RefillRecord]:
        self._number = at_number
        return super().settle(at_number, forks, now)

    @property
    def ready(self) -> bool:
        complete = {group.name for group in self.groups.completed()}
        return super().ready and all(name in complete for name in self._due())

    def _due(self) -> set[str]:
        return {name for name, first in age_hooks.World.begun.items() if first <= self._number - self.bound}

    def _next_groups(self) -> list[Group]:
        due, count = self._due(), self._rules.groups_per_batch
        ordered = sorted(self.groups.completed(), key=lambda group: group.name not in due)
        return ordered[:count]


class _AtPlan(Disposals):
    """A task is done with as soon as its training begins: then the next batch is let out."""

    def record(self, item: Numbered) -> None:
        super().record(item)
        if isinstance(item.record, PlanRecord):
            for tasks in (self._plans[item.sequence],):
                self._add(tasks)


class OneStepOffSource(SourceActor):
    """For comparison: one batch is generated while the one before it is trained, and never more."""

    def __init__(self, context: object) -> None:
        super().__init__(context)  # type: ignore[arg-type]
        self._followers.disposals = _AtPlan(self._source.name)


@dataclass
class _Kinds:
    """The actors of a run."""

    source: type[Actor] = SourceActor
    rollout: type[Actor] = RolloutActor
    reward: type[Actor] = RewardActor
    trainer: type[Actor] = ModelTrainer


async def run(spec: Spec) -> Measured:
    """The whole run."""
    model = spec.model
    ModelWorld.model, ModelWorld.speedup = model, spec.speedup
    age_hooks.World.fleet = Fleet(model, spec.speedup)
    WaitingPlanner.bound = spec.k
    kinds = _Kinds(source=OneStepOffSource if spec.policy == "one_step_off" else SourceActor)
    planner = WaitingPlanner if spec.policy == "wait" else Planner
    with tempfile.TemporaryDirectory(prefix="age-") as place, mock.patch.object(trainer_actor, "Planner", planner):
        async with open_stage(Path(place) / "age", RECIPE, _overrides(spec)) as stage:
            async with _versions(stage), _acting(stage, kinds):
                await stage.until_done(_RUN_S)
            return measured(
                spec.model,
                spec.warm_steps,
                spec.k,
                settled(await read_ledger(stage.bus)),
                await account(stage.bus),
                spec.speedup,
            )


def _overrides(spec: Spec) -> list[str]:
    model = spec.model
    return [
        f"age.bound={spec.k}",
        f"trainer.groups_per_batch={spec.groups}",
        f"rollout.slots={model.fleet * model.slots}",
        f"stop.steps={spec.warm_steps + spec.steps}",
        *spec.options,
    ]


@contextlib.asynccontextmanager
async def _acting(stage: Stage, kinds: _Kinds) -> AsyncIterator[None]:
    """The actors at work; they end with the block. An actor that fails fails the run."""
    actors = [kind(await stage.actor_context(role)) for role, kind in vars(kinds).items()]
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            group.create_task(actor.run(), name=actor.role)
        yield
        for actor in actors:
            actor.context.draining.set()


@contextlib.asynccontextmanager
async def _versions(stage: Stage) -> AsyncIterator[None]:
    """The fleet serves the newest weights of LEDGER, and groups are under way until a plan takes them."""
    follower = asyncio.create_task(_follow(stage), name="versions")
    try:
        yield
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


async def _follow(stage: Stage) -> None:
    world, fleet = age_hooks.World, age_hooks.World.fleet
    async with contextlib.aclosing(LogReader(stage.bus, "ledger").batches()) as batches:
        async for batch in batches:
            for entry in batch:
                record = ledger.decode_entry(entry).record
                if isinstance(record, RollbackRecord):
                    world.epoch = record.new_epoch
                elif isinstance(record, PlanRecord):
                    for name in {one.group for one in record.executions}:
                        world.begun.pop(name, None)
                elif isinstance(record, StepRecord) and record.changed:
                    fleet.update(record.number)
                    world.made_by[record.number] = (fleet.now(), *fleet.totals())


if __name__ == "__main__":
    found = asyncio.run(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)))
    print(msgspec.json.encode(found).decode())
