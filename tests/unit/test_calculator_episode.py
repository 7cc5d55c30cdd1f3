"""A calculator episode by hand: guess or call, masked result, answer; only the demonstrated forms are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from physarum.agents.calculator.episode import generate
from physarum.agents.calculator.reward import exact_match
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.protocols import Generation, TokenIds
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span

TASK = Task(
    id="s/0/0/0", run="t", source="s", ordinal=0, group="s/0/0", group_size=1, member=0, prompt="123+456=", label="0579"
)
CALL = "<tool_call>123+456</tool_call><|im_end|>"
RESULT = "\n<|im_start|>tool\n0579<|im_end|>\n<|im_start|>assistant\n"
PROMPT = "<|im_start|>user\n123+456=<|im_end|>\n<|im_start|>assistant\n"


class Script:
    """Says the given turns under the real tokenizer."""

    sampling: Mapping[str, Any] = {"max_new_tokens": 16}

    def __init__(self, tokenizer: FolderTokenizer, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        ids = self.tokenizer.encode(self.turns.pop(0))[:max_new_tokens]
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            spans=[Span("p@0.1", 0, len(ids))],
            finish_reason="stop" if ids[-1] == 2 else "length",
            cached_tokens=0,
            prompt_tokens=len(token_ids),
            started_at=0.0,
            finished_at=1.0,
            rid="r",
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return FolderTokenizer(folder)


async def play(tokenizer: FolderTokenizer, *turns: str) -> tuple[Sample, float]:
    (sample,) = await generate(TASK, Script(tokenizer, turns))
    execution = Execution(id="e", task=TASK, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)
    return sample, exact_match(execution)


@pytest.mark.asyncio
async def test_calling_the_tool(tokenizer: FolderTokenizer) -> None:
    sample, reward = await play(tokenizer, CALL, "0579<|im_end|>")
    assert tokenizer.decode(sample.token_ids) == PROMPT + CALL + RESULT + "0579<|im_end|>"
    assert sample.prompt_len == 16  # start, user, newline, 8 characters, end, newline, start, assistant, newline
    assert sample.loss_mask.tolist() == [True] * 10 + [False] * 13 + [True] * 5
    assert (sample.outputs, sample.status, reward) == ({"answer": "0579", "tool_called": True}, "completed", 1.0)


@pytest.mark.asyncio
async def test_a_right_guess_is_right(tokenizer: FolderTokenizer) -> None:
    sample, reward = await play(tokenizer, "~0579<|im_end|>")
    assert (sample.outputs, reward) == ({"answer": "0579", "tool_called": False}, 1.0)
    assert sample.loss_mask.tolist() == [True] * 6


@pytest.mark.parametrize(
    ("turns", "tool_called"),
    [
        (["~0580<|im_end|>"], False),
        (["0579<|im_end|>"], False),  # an answer without the tool must be marked as a guess
        (["~579<|im_end|>"], False),
        (["~0579 <|im_end|>"], False),
        (["<tool_call>123-456</tool_call><|im_end|>"], False),
        (["~0579" + CALL], False),
        ([CALL, "~0579<|im_end|>"], True),
        ([CALL, CALL], True),
        ([CALL, "0578<|im_end|>"], True),
        (["<tool_call>123+457</tool_call><|im_end|>", "0580<|im_end|>"], True),  # the tool's truth, not the question's
    ],
)
@pytest.mark.asyncio
async def test_anything_else_is_worth_nothing(tokenizer: FolderTokenizer, turns: list[str], tool_called: bool) -> None:
    sample, reward = await play(tokenizer, *turns)
    assert reward == 0.0
    assert (sample.outputs["tool_called"], sample.status) == (tool_called, "completed")


@pytest.mark.asyncio
async def test_rambling_is_truncated_and_worth_nothing(tokenizer: FolderTokenizer) -> None:
    sample, reward = await play(tokenizer, "~0579" * 10)
    assert (sample.status, sample.response_len, sample.outputs["answer"], reward) == ("truncated", 16, None, 0.0)
