"""Asking a model that judges: a template filled in, one chat completion, and the text of its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from physarum.agents.rewards.errors import BackendReplyError, RewardError
from physarum.configs.reward_types import ChatReward

PATH: Final = "/v1/chat/completions"
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")


def filled(template: str, values: Mapping[str, Any]) -> str:
    """`{{name}}` replaced in one pass, so that what an answer says is never a place itself. Raises RewardError for a name
    that has no value."""

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            raise RewardError(f"the judge's template has {place[0]}; expected one of {', '.join(values)}")
        return readable(values[place[1]])

    return _PLACE.sub(value, template)


def readable(value: Any) -> str:
    """Chat messages as `role: content`, one a paragraph; what is a function is called; everything else as text."""
    if callable(value):
        return str(value())
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        return "\n\n".join(f"{one.get('role', 'user')}: {one['content']}" for one in value)
    return "" if value is None else str(value)


def completion(options: ChatReward, text: str) -> dict[str, Any]:
    """The request body for one user message."""
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    return {
        "model": options.model,
        "messages": [*system, {"role": "user", "content": text}],
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        **options.extra,
    }


def said(options: ChatReward, reply: Any) -> str:
    """The text of a completion. Raises BackendReplyError for anything else."""
    match reply:
        case {"choices": [{"message": {"content": str(content)}}, *_]}:
            return content
    raise BackendReplyError(
        f"{options.engine or options.url}{PATH} answered {reply!r:.200}; expected a chat completion with text"
    )
