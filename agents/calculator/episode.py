"""One calculator episode. Invariant: an answer counts only in the form that the demonstrations show."""

from __future__ import annotations

from typing import Any

from physarum.agents.calculator import dialogue
from physarum.agents.multi_turn import run_turns
from physarum.agents.protocols import Client
from physarum.bus.records import Sample, Task


class Calculator:
    """The environment: adds what a call asks for, once. Outputs: `answer` (four digits or None) and `tool_called`."""

    def __init__(self) -> None:
        self._answer: str | None = None
        self._tool_called = False

    @property
    def outputs(self) -> dict[str, Any]:
        return {"answer": self._answer, "tool_called": self._tool_called}

    async def step(self, text: str) -> str | None:
        if self._tool_called:
            self._answer = dialogue.parse_answer(text)
            return None
        operands = dialogue.parse_call(text)
        if operands is None:
            self._answer = dialogue.parse_guess(text)
            return None
        self._tool_called = True
        return dialogue.observation(dialogue.number(sum(operands)))


async def generate(task: Task, client: Client, *, max_turns: int = 2, max_tokens: int = 64) -> list[Sample]:
    """Hook `rollout.generate`. `task.prompt` is the question (`ddd+ddd=`); `max_tokens` bounds the response."""
    prompt_ids = client.tokenizer.encode(dialogue.prompt(task.prompt))
    return [await run_turns(task, client, prompt_ids, Calculator(), max_turns, max_tokens)]
