"""Which roles there are and where their actors live; imported lazily, so a rollout process never loads torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Final

from physarum.actors.engine.nodes import name_of
from physarum.actors.policies import TRAINER, trainer_instance
from physarum.actors.runtime import Actor
from physarum.configs.root import RootConfig

ROLES: Final = {
    "checkpoint": "physarum.actors.checkpoint.actor:CheckpointActor",
    "source": "physarum.actors.source.actor:SourceActor",
    "engine": "physarum.actors.engine.actor:EngineActor",
    "node": "physarum.actors.node.actor:NodeActor",
    "router": "physarum.actors.router.actor:RouterActor",
    "rollout": "physarum.actors.rollout.actor:RolloutActor",
    "reward": "physarum.actors.reward.actor:RewardActor",
    "trainer": "physarum.actors.trainer.actor:TrainerActor",
    "recorder": "physarum.actors.recorder.actor:RecorderActor",
    "janitor": "physarum.actors.janitor.actor:JanitorActor",
    "evaluator": "physarum.actors.evaluator.actor:EvaluatorActor",
    "autoscaler": "physarum.actors.autoscaler.actor:AutoscalerActor",
}
"""In the order in which the supervisor starts them; nothing depends on that order."""


def actor_class(role: str) -> type[Actor]:
    """The class of a role; raises KeyError for an unknown one."""
    module, _, name = ROLES[role].partition(":")
    found: type[Actor] = getattr(importlib.import_module(module), name)
    return found


def nodes_of(config: RootConfig, group: str, numbers: Iterable[int]) -> list[tuple[str, str]]:
    """(role, instance) of the further nodes of a group's engines."""
    engine = config.engines[group]
    if engine.url is not None:
        return []
    return [
        ("node", name_of(f"{group}-{number}", rank))
        for number in numbers
        for rank in range(1, engine.part_of(number).nodes)
    ]


def instances(config: RootConfig) -> list[tuple[str, str]]:
    """Every (role, instance) that the configuration asks for, in start order."""
    counts = {
        "checkpoint": config.checkpoint.count,
        "source": 0 if config.samples.recorded or config.stop.evaluated else 1,
        "rollout": config.rollout.count,
        "reward": config.reward.count,
        "trainer": 0 if config.trainer.record_only else 1,
        "recorder": 1 if config.trainer.record_only else 0,
        "janitor": 1,
        "evaluator": 1 if config.evaluation is not None else 0,
        "autoscaler": 1 if config.autoscale is not None else 0,
    }
    wanted: list[tuple[str, str]] = []
    for role in ROLES:
        if role == "engine":
            wanted += [
                ("engine", f"{group}-{number}")
                for group, engine in config.engines.items()
                for number in range(engine.instances)
            ]
        elif role == "node":
            for group, engine in config.engines.items():
                wanted += nodes_of(config, group, range(engine.instances))
        elif role == "router":
            started = [group for group, engine in config.engines.items() if engine.start_router is not None]
            wanted += [("router", f"router-{group}-0") for group in started]
        else:
            wanted += [(role, f"{role}-{number}") for number in range(counts[role])]
        if role == TRAINER:
            wanted += [(role, trainer_instance(policy)) for policy in config.policies]
    return wanted
