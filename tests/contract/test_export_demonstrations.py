"""Rejection sampling from a run's log: what is good enough is written, whole or not at all, and trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from actor_fixture import make_context

from physarum.actors.context import Context
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.demonstrations import export_demonstrations
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.wire import publish_execution
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Status, Task
from physarum.bus.version import Span

pytestmark = pytest.mark.timeout(60)


async def store(context: Context, group: int, member: int, reward: float, status: Status = "completed") -> None:
    name = f"main/0/{group}"
    task = Task(
        id=f"{name}/{member}", run=context.bus.run, source="main", ordinal=2 * group + member, group=name, group_size=2,
        member=member, label="42",
    )  # fmt: skip
    sample = Sample(
        token_ids=np.array([1, 10 * group + member], np.int32), prompt_len=1, loss_mask=np.ones(1, np.bool_),
        logprobs=np.full(1, -1.0, np.float32), spans=[Span("policy@1.0", 0, 1)], status=status, reward=reward,
    )  # fmt: skip
    execution = Execution(id=f"{task.id}:x", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=0.0)
    await publish_execution(context, "samples", execution)


@pytest.fixture
async def run(tmp_path: Path, bus: Bus, publisher: Publisher) -> OpenRun:
    """Rewards by group: (1, 0), (0.5, 1), (1, 1), and a truncated 1 beside a 0."""
    context = make_context(tmp_path, bus, publisher, "tool")
    for group, rewards in enumerate([(1.0, 0.0), (0.5, 1.0), (1.0, 1.0)]):
        for member, reward in enumerate(rewards):
            await store(context, group, member, reward)
    await store(context, 3, 0, 1.0, "truncated")
    await store(context, 3, 1, 0.0)
    return OpenRun(context.folder, context.config, bus, publisher, live=False)


def made(path: Path) -> list[int]:
    """The trained token of each line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["label"] == "42" and line["prompt"][0] == {"ids": [1], "train": False} for line in lines)
    return [line["prompt"][1]["ids"][0] for line in lines]


async def test_samples_that_are_good_enough_are_written(run: OpenRun, tmp_path: Path) -> None:
    chosen = await export_demonstrations(run, tmp_path / "out.jsonl", 1.0, best=False)
    assert (chosen.samples, chosen.demonstrations, made(tmp_path / "out.jsonl")) == (8, 4, [0, 11, 20, 21])


async def test_or_the_best_of_each_group(run: OpenRun, tmp_path: Path) -> None:
    chosen = await export_demonstrations(run, tmp_path / "out.jsonl", 0.0, best=True)
    assert (chosen.demonstrations, made(tmp_path / "out.jsonl")) == (4, [0, 11, 20, 31])


async def test_when_nothing_is_good_enough_no_file_is_left(run: OpenRun, tmp_path: Path) -> None:
    with pytest.raises(NotInRunError, match="none of 8 samples .* reward of at least 2"):
        await export_demonstrations(run, tmp_path / "out.jsonl", 2.0, best=False)
    assert not any(tmp_path.glob("*out.jsonl*"))
