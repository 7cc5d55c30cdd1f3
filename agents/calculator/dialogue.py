"""The exact texts of a calculator episode, in one place: what demonstrations show is what episodes and rewards accept.

Turn by turn (`call` and `guess` are the policy's choice):

    <|im_start|>user\\nddd+ddd=<|im_end|>\\n<|im_start|>assistant\\n      prompt
    <tool_call>ddd+ddd</tool_call><|im_end|>                           call   | ~dddd<|im_end|>   guess, ends it
    \\n<|im_start|>tool\\ndddd<|im_end|>\\n<|im_start|>assistant\\n       observation (mask 0)
    dddd<|im_end|>                                                     answer
"""

from __future__ import annotations

import re
from typing import Final

ANSWER_DIGITS: Final = 4
_CALL: Final = re.compile(r"<tool_call>([0-9]{1,3})\+([0-9]{1,3})</tool_call><\|im_end\|>")
_GUESS: Final = re.compile(r"~([0-9]{4})<\|im_end\|>")
_ANSWER: Final = re.compile(r"([0-9]{4})<\|im_end\|>")


def question(a: int, b: int) -> str:
    return f"{a:03d}+{b:03d}="


def number(value: int) -> str:
    """Four digits with leading zeros, as labels, tool results and answers have them."""
    return f"{value:0{ANSWER_DIGITS}d}"


def prompt(asked: str) -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def call(a: int, b: int) -> str:
    return f"<tool_call>{a:03d}+{b:03d}</tool_call><|im_end|>"


def observation(result: str) -> str:
    return f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"


def answer(text: str) -> str:
    return f"{text}<|im_end|>"


def guess(text: str) -> str:
    return answer(f"~{text}")


def parse_call(text: str) -> tuple[int, int] | None:
    """The operands, when the whole turn is one well-formed call."""
    match = _CALL.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def parse_guess(text: str) -> str | None:
    match = _GUESS.fullmatch(text)
    return match[1] if match else None


def parse_answer(text: str) -> str | None:
    match = _ANSWER.fullmatch(text)
    return match[1] if match else None
