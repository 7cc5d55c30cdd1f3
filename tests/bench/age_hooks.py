"""Rows and episodes of B1 and B2: the latency model says how long an answer takes and which weights made its tokens.

One recorded token stands for `UNIT` tokens of the model, so that bodies stay small and the bus carries its samples, not
tens of thousands of zeros for each.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from physarum.agents.protocols import Client
from physarum.bus.records import Sample, Task
from physarum.bus.version import Span, append_span
from tests.bench.latency import Fleet, Model

UNIT: Final = 32
MODEL_NAME: Final = "policy"
SOURCE: Final = "rows"


class Rows:
    """Endless rows of nothing: a task's length follows from its name."""

    def __init__(self, seed: int) -> None:
        pass

    def __len__(self) -> int:
        return 1 << 40

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return {"prompt": "age"}


class World:
    """What the hooks of one process share: the engines, and what they made by task (number, tokens)."""

    fleet: ClassVar[Fleet]
    epoch: ClassVar[int] = 1
    made: ClassVar[dict[str, list[tuple[int, int]]]] = {}
    made_by: ClassVar[dict[int, tuple[float, float, float]]] = {}
    """At the update to each number: the time, slots taken integrated over time, tokens made."""
    begun: ClassVar[dict[str, int]] = {}
    """Groups that are under way, by the number of the weights that made their first token."""


def key_of(task: Task) -> str:
    """What a task's length depends on: another attempt at it has another length."""
    return f"{task.group}/{task.member}+{task.attempt}"


def batch_keys(batch: int, model: Model) -> list[str]:
    """Of the tasks of a batch in the order of issue."""
    groups = range(batch * model.groups, (batch + 1) * model.groups)
    return [f"{SOURCE}/0/{group}/{member}+0" for group in groups for member in range(model.group_size)]


async def generate(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate`."""
    World.begun.setdefault(task.group, World.fleet.number)
    parts = await World.fleet.generate(World.fleet.model.length(key_of(task)))
    World.made[task.id] = parts
    spans: list[Span] = []
    for number, units in recorded(parts):
        append_span(spans, f"{MODEL_NAME}@{World.epoch}.{number}", units)
    response = spans[-1].end
    return [
        Sample(
            token_ids=np.zeros(1 + response, np.int32),
            prompt_len=1,
            loss_mask=np.ones(response, np.bool_),
            logprobs=np.zeros(response, np.float32),
            spans=spans,
        )
    ]


def recorded(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts in recorded tokens: rounded so that the sum is right, at least one in all."""
    found: list[tuple[int, int]] = []
    start = 0
    for number, tokens in parts:
        units = round((start + tokens) / UNIT) - round(start / UNIT)
        start += tokens
        if units:
            found.append((number, units))
    return found or [(parts[-1][0], 1)]
