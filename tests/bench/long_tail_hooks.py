"""Rows and episodes of the long tail on GPUs: how many tokens an answer has is the row's, not the model's, and few are long."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import numpy as np

from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Execution, Sample, Task

PROMPT: Final = 64
FIRST_ID: Final = 8
"""Ids below it may be special."""
SIZE: Final = 1 << 20


class LongTail:
    """Prompts; each member of a group has a length of its own: lognormal with `median` and `sigma`, at most `most` tokens."""

    def __init__(self, seed: int, *, vocabulary: int, median: int, sigma: float, most: int, group: int) -> None:
        self._seed, self._vocabulary = seed, vocabulary
        self._median, self._sigma, self._most, self._group = median, sigma, most, group

    def __len__(self) -> int:
        return SIZE

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        random = np.random.default_rng((self._seed, epoch, index))
        prompt = random.integers(FIRST_ID, self._vocabulary, PROMPT).tolist()
        lengths = self._median * np.exp(self._sigma * random.standard_normal(self._group))
        return {"prompt": prompt, "metadata": {"tokens": np.clip(lengths, 16, self._most).astype(int).tolist()}}


async def generate_group(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate` of a slot that is a whole group: one task, all members at once, done with the longest."""
    members = range(len(task.metadata["tokens"]))
    made = await asyncio.gather(*(_member(task, client, member) for member in members))
    return list(made)


async def generate(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate`."""
    return [await _member(task, client, task.member)]


async def _member(task: Task, client: Client, member: int) -> Sample:
    trajectory = Trajectory(task.prompt)
    wanted = int(task.metadata["tokens"][member])
    trajectory.append_generated(
        await client.generate(trajectory.token_ids, {"ignore_eos": True}, max_new_tokens=wanted)
    )
    return trajectory.sample(status="completed")


def reward(execution: Execution) -> list[float]:
    """Hook `reward.hook`: something that differs within a group."""
    return [float(sample.token_ids[-1] % 2) for sample in execution.samples]
