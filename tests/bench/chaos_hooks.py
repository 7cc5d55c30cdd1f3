"""Episodes and rewards of the chaos benchmark: pure functions of the task and of the tokens that were made for it."""

from __future__ import annotations

import numpy as np

from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Execution, Sample, Task

TURNS = 2
OBSERVATION = "\nseen\n"


async def generate(task: Task, client: Client) -> list[Sample]:
    """Two turns with an observation between them; the second turn may be made by another version, on another engine."""
    trajectory = Trajectory(client.tokenizer.encode(task.prompt))
    for turn in range(TURNS):
        if turn:
            trajectory.append_environment(client.tokenizer.encode(OBSERVATION))
        trajectory.append_generated(await client.generate(trajectory.token_ids))
    return [trajectory.sample()]


def even_share(execution: Execution) -> float:
    """The share of the policy's tokens with an even id: differs between the members of a group, so that there is an
    advantage, and depends on every token, so that a wrong one changes the weights."""
    sample = execution.samples[-1]
    made = sample.token_ids[sample.prompt_len :][sample.loss_mask]
    return float(np.mean(made % 2 == 0))
