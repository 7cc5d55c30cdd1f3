"""Which set of problems an evaluation's task belongs to: it stands at the end of its source's name."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TypeVar

from physarum.bus.records import Task
from physarum.configs.evaluation import EvaluationSet
from physarum.configs.root import RootConfig

T = TypeVar("T")
U = TypeVar("U")


def source_name(label: str, name: str) -> str:
    """A name for one evaluation of one set alone."""
    return f"eval/{label}/{uuid.uuid4().hex[:8]}/{name}"


def own(task: Task, of_sets: Mapping[str, T], others: U) -> T | U:
    """What the task's set has of its own; `others` for training, and for sets without."""
    if task.task_class != "eval":
        return others
    return of_sets.get(task.source.rpartition("/")[2], others)


def sets_of(config: RootConfig) -> dict[str, EvaluationSet]:
    """Every set of the run's evaluation."""
    return {} if config.evaluation is None else config.evaluation.named()
