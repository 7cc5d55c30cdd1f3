"""`remote_rm`: a reward model behind HTTP, asked as slime asks it: {"prompt", "response", "label"} as JSON, a number back."""

from __future__ import annotations

import functools
from typing import Any

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.errors import BackendReplyError
from physarum.configs.reward_types import RemoteReward


async def score_remote(answer: Answer, options: RemoteReward) -> float | None:
    """Raises what Backend.post raises, and BackendReplyError for JSON without a number."""
    return await backend_for(options).post(question(answer, options), functools.partial(_number, options))


def _number(options: RemoteReward, reply: Any) -> float:
    value = reply.get(options.key) if isinstance(reply, dict) else reply
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BackendReplyError(
            f"{options.url} answered {reply!r:.200}; expected a number, or an object with one under {options.key!r}"
        )
    return float(value)


def question(answer: Answer, options: RemoteReward) -> dict[str, Any]:
    """What is sent, and therefore what a cached score stands for."""
    known = {
        "prompt": answer.prompt,
        "response": answer.text,
        "label": answer.label,
        "metadata": answer.metadata,
    }
    return {name: known[name] for name in options.fields}
