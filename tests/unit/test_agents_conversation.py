"""Conversations become the template's own ids, trained where the assistant speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from physarum.agents.conversation import is_conversation, tokens_and_mask
from physarum.agents.demonstration import demonstration
from physarum.agents.errors import DemonstrationError
from physarum.agents.protocols import TokenIds


class Template:
    """One token per character; consecutive tool messages share a turn, as in Qwen's template. `forgetful`: thinking in
    earlier turns is dropped."""

    def __init__(self, forgetful: bool = False) -> None:
        self.forgetful = forgetful

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: TokenIds) -> str:
        return "".join(chr(int(token)) for token in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        text = ""
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            joined = role == "tool" and index > 0 and messages[index - 1]["role"] == "tool"
            goes_on = role == "tool" and index + 1 < len(messages) and messages[index + 1]["role"] == "tool"
            if self.forgetful and role == "assistant" and index + 1 < len(messages):
                content = content.rpartition("</think>")[2]
            text += ("" if joined else f"<{role[0]}>") + content + ("|" if goes_on else ">\n")
        return self.encode(text + ("<a>" if add_generation_prompt else ""))


def trained(messages: list[dict[str, Any]], template: Template) -> list[str]:
    """The trained runs, as text."""
    ids, mask = tokens_and_mask(messages, template, "demo")
    assert ids == template.render([{**one} for one in messages], add_generation_prompt=False)
    runs, last = [], False
    for token, inside in zip(ids, mask, strict=True):
        if inside:
            runs = [*runs[:-1], runs[-1] + chr(token)] if last else [*runs, chr(token)]
        last = inside
    return runs


TOOLS = [
    {"role": "user", "content": "1+1 and 2+2?"},
    {"role": "assistant", "content": "call,call"},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "2 and 4"},
]


def test_every_assistant_message_is_trained_to_its_end_of_turn_also_behind_parallel_tool_messages() -> None:
    assert trained(TOOLS, Template()) == ["call,call>", "2 and 4>"]


def test_a_message_may_be_left_out() -> None:
    told = [{**TOOLS[0]}, {**TOOLS[1], "train": False}, *TOOLS[2:]]
    ids, mask = tokens_and_mask(told, Template(), "demo")
    assert ids == Template().render(TOOLS, add_generation_prompt=False), "the mark does not reach the template"
    assert sum(mask) == len("2 and 4>")


def test_a_template_that_forgets_is_named_with_the_message() -> None:
    told = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>x</think>a"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b"},
    ]
    with pytest.raises(
        DemonstrationError, match="demo, behind message 1: the chat template renders the beginning otherwise"
    ):
        tokens_and_mask(told, Template(forgetful=True), "demo")
    assert trained([told[0], {**told[1], "train": False}, *told[2:]], Template(forgetful=True)) == ["b>"]


def test_a_conversation_is_a_demonstration() -> None:
    sample = demonstration(TOOLS, Template(), "demo")
    assert sample.prompt_len == len("<u>1+1 and 2+2?>\n<a>")
    assert sample.turns.max() == 1
    assert is_conversation(TOOLS) and not is_conversation([{"text": "a", "train": True}]) and not is_conversation([])
