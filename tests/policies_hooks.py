"""Episodes of two policies: they speak in turns, each hears the other as its environment; some tasks are the first's alone."""

from __future__ import annotations

import numpy as np

from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Execution, Sample, Task

TURNS = 2


async def generate(task: Task, client: Client, *, alone_every: int = 5) -> list[Sample]:
    """`alone_every`: of so many tasks one has no turn of the solver."""
    prompt = client.tokenizer.encode(task.prompt)
    proposer, solver = client, client.of("solver")
    if task.ordinal % alone_every == 0:
        spoken = Trajectory(prompt)
        spoken.append_generated(await proposer.generate(spoken.token_ids))
        return [spoken.sample()]
    proposed = Trajectory(prompt)
    proposed.append_generated(await proposer.generate(proposed.token_ids))
    solved = Trajectory(list(proposed.token_ids))
    for turn in range(TURNS):
        answer = await solver.generate(solved.token_ids)
        solved.append_generated(answer)
        if turn < TURNS - 1:
            proposed.append_environment(answer.token_ids)
            proposal = await client.of("policy").generate(proposed.token_ids)
            proposed.append_generated(proposal)
            solved.append_environment(proposal.token_ids)
    return [proposed.sample(), solved.sample()]


def even_shares(execution: Execution) -> list[float]:
    """Of each sample the share of its policy's tokens with an even id: depends on every token, and differs in a group."""
    return [float(np.mean(one.token_ids[one.prompt_len :][one.loss_mask] % 2 == 0)) for one in execution.samples]
