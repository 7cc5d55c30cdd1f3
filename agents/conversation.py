"""Conversations as demonstrations: the ids of the whole template, with the mask on what the assistant said.

Invariant: the tokens are exactly those of the template over the whole conversation, which is what an engine would see; a
message is trained only where the template of the conversation up to it is a true beginning of the whole (tool messages that a
template joins into one turn are no obstacle: only beginnings before and behind an assistant's message matter).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from physarum.agents.errors import DemonstrationError
from physarum.agents.protocols import Tokenizer

_SPOKEN_BY: Final = "assistant"

Message = Mapping[str, Any]


def is_conversation(row: Sequence[Any]) -> bool:
    """Whether a demonstration is a list of messages ("role", "content", ...), not of segments."""
    return bool(row) and all(isinstance(one, Mapping) and "role" in one for one in row)


def tokens_and_mask(
    messages: Sequence[Message], tokenizer: Tokenizer, name: str, options: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of the whole conversation, and where they are trained: each assistant message without `"train": false`.

    `options`: as Tokenizer.render takes them.

    From behind the template's generation prompt to the end of what it puts there for the message, white space behind the end
    of the turn excepted: an engine stops before it. Raises DemonstrationError naming the message that does not fit.
    """
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    render = functools.partial(tokenizer.render, **(options or {}))
    whole = render(plain, add_generation_prompt=False)
    mask = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != _SPOKEN_BY or not message.get("train", True):
            continue
        begin = _beginning(plain[:index], True, whole, render, f"{name}, before message {index}")
        end = _beginning(plain[: index + 1], False, whole, render, f"{name}, behind message {index}")
        while end > begin and not tokenizer.decode(whole[end - 1 : end]).strip():
            end -= 1
        mask[begin:end] = [True] * (end - begin)
    return whole, mask


def _beginning(
    messages: Sequence[Message], prompted: bool, whole: Sequence[int], render: Callable[..., list[int]], name: str
) -> int:
    """How many tokens of `whole` the template makes of its first messages."""
    part = render(messages, add_generation_prompt=prompted)
    if list(whole[: len(part)]) != part:
        at = next(
            (place for place, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), min(len(whole), len(part))
        )
        raise DemonstrationError(
            f"{name}: the chat template renders the beginning otherwise than within the whole conversation (from token {at}"
            " on); expected the same ids. Use a template that keeps earlier turns as they are (it may drop thinking), or give"
            " segments with ids"
        )
    return len(part)
