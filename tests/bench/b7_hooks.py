"""Requests of B7: seeded prompts, and lengths that the requests have whatever is generated, so that both sides do the same."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Execution, Sample, Task

PROMPT: Final = 64
FIRST_ID: Final = 8
"""Ids below it may be special."""


class Requests:
    """`count` rows: prompt ids below `vocabulary`, and a number of tokens, uniform on [mean/2, 3/2 mean]."""

    def __init__(self, seed: int, *, count: int, mean: int, vocabulary: int) -> None:
        self._seed, self._count, self._mean, self._vocabulary = seed, count, mean, vocabulary

    def __len__(self) -> int:
        return self._count

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        random = np.random.default_rng((self._seed, index))
        prompt = random.integers(FIRST_ID, self._vocabulary, PROMPT).tolist()
        return {"prompt": prompt, "metadata": {"tokens": int(random.integers(self._mean // 2, 3 * self._mean // 2))}}


async def generate(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate`: one generation of exactly as many tokens as the row says."""
    trajectory = Trajectory(task.prompt)
    wanted = int(task.metadata["tokens"])
    trajectory.append_generated(
        await client.generate(trajectory.token_ids, {"ignore_eos": True}, max_new_tokens=wanted)
    )
    return [trajectory.sample(status="completed")]


def reward(execution: Execution) -> float:
    """Hook `reward.hook`: there is one, as in every run."""
    return 1.0
