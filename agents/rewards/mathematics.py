"""Are two mathematical expressions equal: math-verify, with its alarms, over an answer of bounded length.

math-verify (github.com/huggingface/Math-Verify) stops parsing and comparing by SIGALRM, so these functions belong to the
main thread, where hook processes call them. What it cannot stop (one C call that grows a number) ends with the call's
deadline, and by `reward.memory_mib`.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import last_boxed
from physarum.configs.reward_types import DeepscalerReward, MathReward

_MARKS: Final = ("</think>", "###Response")
"""deepscaler's order: what follows the first of these that the text holds."""


def score_math(answer: Answer, options: MathReward) -> float:
    """1.0 where the answer equals the label (or one of several), else 0.0."""
    given = answer.text if options.answer == "anywhere" else last_boxed(answer.text)
    return _graded(given, answer, options.timeout_s, options.max_chars, bare=options.answer == "boxed")


def score_deepscaler(answer: Answer, options: DeepscalerReward) -> float:
    """slime's `deepscaler`: a text that never ended its thinking is wrong, whatever it holds."""
    mark = next((mark for mark in _MARKS if mark in answer.text), None)
    given = None if mark is None else last_boxed(answer.text.rpartition(mark)[2])
    return _graded(given, answer, options.timeout_s, options.max_chars, bare=True)


def _graded(given: str | None, answer: Answer, timeout_s: int, max_chars: int, *, bare: bool) -> float:
    """`bare`: `given` is an expression; else a text that has one in it, of which the end is looked at."""
    labels = [label for label in answer.labels() if label.strip()]
    if not labels:
        raise RewardError(f"task {answer.task} has an empty label; expected a mathematical expression")
    if given is None or not given.strip() or (bare and len(given) > max_chars):
        return 0.0
    said = _parsed(given.strip() if bare else given[-max_chars:], timeout_s, bare=bare)
    return float(any(_equal(_label(label, answer.task, timeout_s), said, timeout_s) for label in labels))


def _label(label: str, task: str, timeout_s: int) -> list[Any]:
    boxed = last_boxed(label)
    parsed = _parsed((label if boxed is None else boxed).strip().strip("$"), timeout_s, bare=True)
    if not parsed:
        raise RewardError(f"task {task} has the label {label!r:.80}; expected a mathematical expression")
    return parsed


def _parsed(text: str, timeout_s: int, *, bare: bool) -> list[Any]:
    """What math-verify reads; empty where it reads nothing, or not in time."""
    from math_verify import parse  # type: ignore[import-untyped]

    _check_thread()
    found: list[Any] = parse(f"${text}$" if bare else text, parsing_timeout=timeout_s)
    return found


def _equal(label: list[Any], said: list[Any], timeout_s: int) -> bool:
    from math_verify import verify

    return bool(said) and bool(verify(label, said, timeout_seconds=timeout_s))


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RewardError("math was scored outside the main thread; expected it there: its deadline is an alarm signal")


# It logs the whole text that it could not parse in time, which a policy chooses.
logging.getLogger("math_verify").setLevel(logging.ERROR)
