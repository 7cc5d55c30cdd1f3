"""Policy and environment in turn. Invariant: the history is never re-tokenised, so what is trained is what was sampled.

Each turn decodes only its own tokens and encodes only its own observation: text work is linear in the turns.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from physarum.agents.errors import EnvironmentTimeoutError
from physarum.agents.protocols import Client, Environment, Generation, TokenIds
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Sample, Status, Task

DEFAULT_STEP_TIMEOUT_S = 60.0
_CUT_SHORT: dict[str, Status] = {"length": "truncated", "abort": "aborted"}


async def run_turns(
    task: Task,
    client: Client,
    prompt_ids: TokenIds,
    environment: Environment,
    max_turns: int,
    max_tokens: int,
    *,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
) -> Sample:
    """Generate, step the environment, append its answer with mask 0, until it is done or a budget ends.

    `max_turns` counts generations; `max_tokens` counts response tokens, the environment's included, and is never
    exceeded. Status: completed (the environment ended it), truncated (a turn or a budget was cut short) or aborted.
    Raises EnvironmentTimeoutError, and whatever the client or the environment raises.
    """
    trajectory = Trajectory(prompt_ids)
    status: Status = "truncated"
    for turn in range(max_turns):
        generation = await client.generate(
            trajectory.token_ids, max_new_tokens=_turn_budget(client, trajectory, max_tokens)
        )
        trajectory.append_generated(generation)
        if generation.finish_reason in _CUT_SHORT:
            status = _CUT_SHORT[generation.finish_reason]
            break
        observation = await _observe(task, client, environment, generation, trajectory, step_timeout_s)
        if observation is None:
            status = "completed"
            break
        if turn + 1 == max_turns or trajectory.response_len + len(observation) >= max_tokens:
            break  # nothing could be said after this observation, so it is not part of the trajectory
        trajectory.append_environment(observation)
    return trajectory.sample(status=status, outputs=environment.outputs)


def _turn_budget(client: Client, trajectory: Trajectory, max_tokens: int) -> int:
    remaining = max_tokens - trajectory.response_len
    per_turn: Any = client.sampling.get("max_new_tokens")
    return remaining if per_turn is None else min(int(per_turn), remaining)


async def _observe(
    task: Task,
    client: Client,
    environment: Environment,
    generation: Generation,
    trajectory: Trajectory,
    timeout_s: float,
) -> list[int] | None:
    """The environment's answer in tokens; its time is recorded as a "tool" event."""
    started_at = time.time()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            text = await environment.step(client.tokenizer.decode(generation.token_ids))
    except TimeoutError as error:
        if not deadline.expired():
            raise  # the environment's own timeout, not ours
        raise EnvironmentTimeoutError(
            f"{type(environment).__name__} of task {task.id} did not answer a step within {timeout_s} s;"
            " raise step_timeout_s or bound the tool's own time"
        ) from error
    trajectory.record_event("tool", started_at, time.time())
    return None if text is None else client.tokenizer.encode(text)
