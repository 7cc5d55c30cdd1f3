"""What is judged: the last turn of the policy as text, and its task's row.

Invariant: nothing that the environment said is ever part of the text, so a tool's output cannot earn a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from physarum.agents.errors import TokenizerError
from physarum.agents.protocols import TokenIds
from physarum.agents.rewards.errors import RewardError
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample


@dataclass(frozen=True, slots=True)
class Answer:
    """`text` as the policy wrote it, without the tokens that end a turn; `task` names the row in messages; `transcript()` is
    the whole sample as text, prompt, tools and special tokens included; `token_ids` the same as they are."""

    text: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None
    task: str = ""
    transcript: Callable[[], str] = field(default=str, repr=False, compare=False)
    token_ids: TokenIds = field(default=(), repr=False, compare=False)

    def with_text(self, text: str) -> Answer:
        return replace(self, text=text)

    def labels(self) -> list[str]:
        """The label as texts, several where it is a list of equally right ones. Raises RewardError where it is neither."""
        given = self.label if isinstance(self.label, list) else [self.label]
        if not given or not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in given):
            raise RewardError(
                f"task {self.task} has the label {self.label!r:.80}; expected a text, a number, or a list of them."
                " Remedy: name the column that holds it in source.columns.label"
            )
        return [str(one) for one in given]


def answer_of(execution: Execution, tokenizer: FolderTokenizer) -> Answer:
    """Of the execution's last sample. An episode that knows better what it said gives `outputs["response"]`."""
    sample, task = execution.samples[-1], execution.task
    given = sample.outputs.get("response")
    text = given if isinstance(given, str) else last_turn(sample, tokenizer)
    return Answer(
        text=text,
        label=task.label,
        metadata=task.metadata,
        prompt=task.prompt,
        task=task.id,
        transcript=lambda: tokenizer.decode(sample.token_ids),
        token_ids=sample.token_ids,
    )


def last_turn(sample: Sample, tokenizer: FolderTokenizer) -> str:
    """The tokens of the policy's last turn, decoded; empty where it said nothing. Raises RewardError without a tokenizer."""
    turns = sample.turns
    ids = sample.token_ids[sample.prompt_len :][turns == turns.max(initial=0)] if turns.size else sample.token_ids[:0]
    return spoken(ids, tokenizer)


def spoken(token_ids: TokenIds, tokenizer: FolderTokenizer) -> str:
    """`token_ids` as text, without the tokens at the end that end a turn."""
    if not len(token_ids):
        return ""
    try:
        return tokenizer.decode(_without_endings(token_ids, tokenizer.endings))
    except TokenizerError as error:
        raise RewardError(f"what the policy said cannot be read: {error}; or give outputs['response']") from error


def _without_endings(token_ids: TokenIds, endings: Collection[int]) -> TokenIds:
    kept = np.flatnonzero(~np.isin(np.asarray(token_ids), list(endings)))
    return token_ids[: int(kept[-1]) + 1] if kept.size else []
