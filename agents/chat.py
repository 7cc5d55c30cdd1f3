"""A task's prompt as the tokens of a chat template.

Invariant: what a data set asks for (`source.chat`: system prompt, template, its arguments) travels with each task, so that
training and every evaluation render their own, on whichever host an episode runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from physarum.agents.errors import TaskError, TemplateUnreadableError
from physarum.agents.protocols import Tokenizer
from physarum.bus.records import Task

METADATA_KEY: Final = "chat"
TOOLS_KEY: Final = "tools"


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What metadata["chat"] holds. `template`: a Jinja file; None takes the tokenizer's own."""

    system_prompt: str | None = None
    template: str | None = None
    template_kwargs: dict[str, Any] = {}


def given_messages(prompt: Any) -> list[dict[str, Any]] | None:
    """A prompt as it was given, as messages; None for what is neither a text nor a list of messages."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) and "role" in one for one in prompt):
        return [{key: value for key, value in one.items() if value is not None} for one in prompt]
    return None


def messages_of(task: Task) -> list[dict[str, Any]]:
    """The conversation that the policy continues: a text is what the user says; the system prompt goes before it, unless the
    row brings one. Keys without a value are left out (Parquet has every key in every message).

    Raises TaskError for a prompt that is neither a text nor a list of messages.
    """
    chat, messages = chat_of(task), given_messages(task.prompt)
    if messages is None:
        raise TaskError(
            f"task {task.id} has a prompt of {type(task.prompt).__name__}; expected a text, or a list of messages with `role`"
            " and `content`. Name the column that holds it in `source.columns.prompt`"
        )
    return with_system_prompt(messages, chat)


def with_system_prompt(messages: list[dict[str, Any]], chat: Chat) -> list[dict[str, Any]]:
    """The conversation behind the system prompt, unless it has one."""
    if chat.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": chat.system_prompt}, *messages]


def prompt_ids(task: Task, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the rendered prompt, up to where the policy speaks. Blocks (a first call imports transformers: seconds)."""
    return tokenizer.render(messages_of(task), **render_options(task))


def render_options(task: Task) -> dict[str, Any]:
    """What Tokenizer.render gets besides the messages: the template's arguments, the template, the tools. Raises TaskError."""
    chat = chat_of(task)
    options: dict[str, Any] = dict(chat.template_kwargs)
    if chat.template is not None:
        options["chat_template"] = _read(Path(chat.template))
    if task.metadata.get(TOOLS_KEY):
        options["tools"] = task.metadata[TOOLS_KEY]
    return options


def chat_of(task: Task) -> Chat:
    """What the task asks for. Raises TaskError."""
    try:
        return msgspec.convert(task.metadata.get(METADATA_KEY) or {}, Chat)
    except msgspec.ValidationError as error:
        raise TaskError(
            f"task {task.id}: metadata[{METADATA_KEY!r}] is not what `source.chat` writes ({error}); expected"
            f" {', '.join(Chat.__struct_fields__)}"
        ) from error


@functools.lru_cache(maxsize=32)
def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateUnreadableError(
            f"chat template {path} cannot be read ({error}); expected a Jinja file on every host that runs episodes. Correct"
            " `source.chat.template`, or copy the file there"
        ) from error
