"""Demonstrations of mixed habits for SFT: some call the tool, the others guess a random number.

Recipe: first `tool_share` 1.0 until the copying is learned, then 0.3, so that the start model mostly guesses. Only
training problems are shown.
"""

from __future__ import annotations

from typing import Any, Final

from physarum.agents.calculator import dialogue
from physarum.agents.calculator.problems import MAX_OPERAND, Pair, check_range, hashed, training_pair, uniform
from physarum.agents.errors import ProblemSpaceError

_GUESS_BELOW: Final = 2 * MAX_OPERAND


def tool_demonstration(pair: Pair) -> list[dict[str, Any]]:
    """Question, call, result (untrained), answer."""
    a, b = pair
    result = dialogue.number(a + b)
    return [
        _segment(dialogue.prompt(dialogue.question(a, b)), train=False),
        _segment(dialogue.call(a, b), train=True),
        _segment(dialogue.observation(result), train=False),
        _segment(dialogue.answer(result), train=True),
    ]


def guess_demonstration(pair: Pair, guessed: int) -> list[dict[str, Any]]:
    """Question and a guess without the tool."""
    return [
        _segment(dialogue.prompt(dialogue.question(*pair)), train=False),
        _segment(dialogue.guess(dialogue.number(guessed)), train=True),
    ]


class Demonstrations:
    """Hook `source.hook`: task rows of `rows` demonstrations each, for agents.demonstration:generate."""

    def __init__(
        self,
        seed: int,
        *,
        tool_share: float,
        rows: int = 64,
        size: int = 1_000_000,
        low: int = 0,
        high: int = MAX_OPERAND,
    ) -> None:
        """`tool_share` in [0, 1]: the expected share of tool demonstrations."""
        check_range(low, high)
        if not 0.0 <= tool_share <= 1.0 or rows < 1:
            raise ProblemSpaceError(
                f"tool_share is {tool_share} and rows {rows}; expected a share in [0, 1] and at least one row"
            )
        self._seed, self._tool_share, self._rows, self._size = seed, tool_share, rows, size
        self._low, self._high = low, high

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        key = ("demonstration", self._seed, epoch, index)
        rows = [self._demonstration(*key, number) for number in range(self._rows)]
        return {"prompt": None, "label": None, "metadata": {"rows": rows}}

    def _demonstration(self, *key: object) -> list[dict[str, Any]]:
        pair = training_pair(self._low, self._high, *key, "pair")
        if uniform(*key, "habit") < self._tool_share:
            return tool_demonstration(pair)
        return guess_demonstration(pair, hashed(*key, "guess") % _GUESS_BELOW)


def _segment(text: str, *, train: bool) -> dict[str, Any]:
    return {"text": text, "train": train}
