"""Demonstrations as episodes: no engine takes part, so tokens carry a mask but neither log-probabilities nor spans.

A demonstration is a list of segments {"text": str} or {"ids": list[int]}, each with "train": bool, or a conversation: a list
of messages {"role", "content", ...} under the chat template (chat.py), of which the assistant's are trained unless they say
"train": false (conversation.py). The untrained tokens at its beginning are the prompt. One task may hold many
demonstrations ("rows"), each of which becomes one sample: SFT on small ones is then bound by the trainer, not by messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from physarum.agents.chat import chat_of, render_options, with_system_prompt
from physarum.agents.conversation import is_conversation, tokens_and_mask
from physarum.agents.errors import DemonstrationError
from physarum.agents.protocols import Client, Tokenizer
from physarum.bus.records import Sample, Task

Segment = Mapping[str, Any]


async def generate(task: Task, client: Client) -> list[Sample]:
    """Hook `rollout.generate` for SFT: task.metadata["rows"], task.metadata["segments"] or task.prompt as samples.

    Raises DemonstrationError naming the demonstration that is wrong.
    """
    chat, options = chat_of(task), render_options(task)
    rows = [with_system_prompt(list(row), chat) if is_conversation(row) else row for row in _rows(task)]
    return [
        demonstration(row, client.tokenizer, f"{task.id} demonstration {number}", options)
        for number, row in enumerate(rows)
    ]


def demonstration(
    segments: Sequence[Segment], tokenizer: Tokenizer, name: str, options: Mapping[str, Any] | None = None
) -> Sample:
    """One demonstration as a Sample of origin "demonstration"; `name` is for error messages, `options` for a conversation's
    template (Tokenizer.render)."""
    if is_conversation(segments):
        ids, mask = tokens_and_mask(segments, tokenizer, name, options)
    else:
        ids, mask = _joined(segments, tokenizer, name)
    prompt_len = mask.index(True) if True in mask else 0
    if prompt_len == 0:
        raise DemonstrationError(
            f"{name} has {len(ids)} tokens, {sum(mask)} of them trained; expected a trained segment behind at least one"
            ' untrained prompt token: mark segments with "train": true or false'
        )
    response = len(ids) - prompt_len
    return Sample(
        token_ids=np.asarray(ids, dtype=np.int32),
        prompt_len=prompt_len,
        loss_mask=np.asarray(mask[prompt_len:], dtype=np.bool_),
        logprobs=np.full(response, np.nan, dtype=np.float32),
        origin="demonstration",
    )


def _joined(segments: Sequence[Segment], tokenizer: Tokenizer, name: str) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    for segment in segments:
        tokens = _tokens(segment, tokenizer, name)
        ids += tokens
        mask += [bool(segment.get("train", False))] * len(tokens)
    return ids, mask


def _rows(task: Task) -> Sequence[Sequence[Segment]]:
    if "rows" in task.metadata:
        rows: Sequence[Sequence[Segment]] = task.metadata["rows"]
    else:
        rows = [task.metadata.get("segments", task.prompt)]
    if not rows or not all(isinstance(row, list) and all(isinstance(part, dict) for part in row) for row in rows):
        raise DemonstrationError(
            f"task {task.id} holds no demonstration; expected a list of segments as prompt or metadata['segments'],"
            " or a list of such lists as metadata['rows']"
        )
    return rows


def _tokens(segment: Segment, tokenizer: Tokenizer, name: str) -> list[int]:
    match segment:
        case {"ids": [*ids]} if "text" not in segment:
            return [int(token) for token in ids]
        case {"text": str(text)} if "ids" not in segment:
            return tokenizer.encode(text)
    raise DemonstrationError(
        f'{name} has a segment with keys {sorted(segment)}; expected "text" (a string) or "ids" (a list), and "train"'
    )
