"""The calculator episode with two policies: the caller guesses or calls the tool, the reader answers from what it showed.

Each has a trajectory of its own, in which the other's turn is not trained: the reader's begins with all that was said before
it. Where the caller guessed there is nothing to read, and the execution is the caller's alone.
"""

from __future__ import annotations

from typing import Any, Final

from physarum.agents.calculator import dialogue
from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Sample, Status, Task

READER: Final = "reader"
"""The name under `policies`; the caller is the run's own policy."""


async def generate(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate`. Both samples have the same `answer`, so that the reward of one is the other's, too."""
    asked = client.tokenizer.encode(dialogue.prompt(task.prompt))
    calling, status, text = await _turn(client, asked)
    operands = dialogue.parse_call(text)
    if operands is None:
        return [_sample(calling, status, dialogue.parse_guess(text), called=False)]
    shown = client.tokenizer.encode(dialogue.observation(dialogue.number(sum(operands))))
    reading, read_status, said = await _turn(client.of(READER), [*calling.token_ids.tolist(), *shown])
    answer = dialogue.parse_answer(said)
    return [_sample(calling, status, answer, called=True), _sample(reading, read_status, answer, called=True)]


async def _turn(client: Client, prompt_ids: list[int]) -> tuple[Trajectory, Status, str]:
    """One turn of the client's policy: its trajectory, how it ended, its text."""
    trajectory = Trajectory(prompt_ids)
    made = await client.generate(prompt_ids)
    trajectory.append_generated(made)
    status: Status = "completed" if made.finish_reason == "stop" else "truncated"
    return trajectory, status, client.tokenizer.decode(made.token_ids)


def _sample(trajectory: Trajectory, status: Status, answer: str | None, *, called: bool) -> Sample:
    outputs: dict[str, Any] = {"answer": answer, "tool_called": called}
    return trajectory.sample(status=status, outputs=outputs)
