"""One prompt, one answer: the episode of ordinary chat data. Invariant: what is trained is what the engine sampled."""

from __future__ import annotations

import asyncio
from typing import Final

from physarum.agents.chat import prompt_ids
from physarum.agents.errors import PromptTooLongError, TaskError
from physarum.agents.protocols import Client, FinishReason, Generation
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Sample, Status, Task

_STATUS: Final[dict[FinishReason, Status]] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
_ATTACHED: Final = ("images", "videos", "audios")


async def generate(task: Task, client: Client, *, max_prompt_tokens: int | None = None) -> list[Sample]:
    """Hook `rollout.generate`: `task.prompt` (a text or messages) under the chat template, and what the policy answers.

    Outputs: `text`, the answer without the special token that ended it. Raises TaskError for a prompt that is no
    conversation, PromptTooLongError for one of more than `max_prompt_tokens`, and whatever the client raises.
    """
    attached = [name for name in _ATTACHED if task.metadata.get(name)]
    if attached:
        raise TaskError(
            f"task {task.id} comes with {', '.join(attached)}, which this agent cannot show to the policy; expected text alone."
            " Write an agent that sends them (metadata holds the references), or leave `source.columns.images` out"
        )
    ids = await asyncio.to_thread(prompt_ids, task, client.tokenizer)
    if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
        raise PromptTooLongError(
            f"task {task.id} has a prompt of {len(ids)} tokens; expected at most {max_prompt_tokens}. Shorten it, or raise"
            " `rollout.args.max_prompt_tokens`"
        )
    trajectory = Trajectory(ids)
    generation = await client.generate(ids)
    trajectory.append_generated(generation)
    text = answer_text(client, generation)
    return [trajectory.sample(status=_STATUS[generation.finish_reason], outputs={"text": text})]


def answer_text(client: Client, generation: Generation) -> str:
    """The text of a generation, without the special token that ended it (others, such as <think>, stay)."""
    ids = generation.token_ids
    ended = generation.finish_reason == "stop" and len(ids) > 0 and client.tokenizer.is_special(int(ids[-1]))
    return client.tokenizer.decode(ids[:-1] if ended else ids)
