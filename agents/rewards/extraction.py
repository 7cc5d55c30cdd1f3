"""Finding the answer in a text, by scanning: every function here is linear in the text."""

from __future__ import annotations

import re
from typing import Final

_BOXES: Final = ("\\boxed", "\\fbox")
_BLANK_BOX: Final = re.compile(r"\\boxed ([^\s$]+)")


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds, braces balanced, or the word of `\\boxed word`. None without one,
    and for one that is never closed: an earlier box does not stand in for it."""
    start, name = max((text.rfind(box), box) for box in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(name) :]
    if rest.startswith("{"):
        return _braced(rest)
    found = _BLANK_BOX.match(text, start)
    return found[1] if found else None


def _braced(text: str) -> str | None:
    """Inside the braces with which `text` begins. An escaped brace is a character."""
    depth, escaped = 0, False
    for index, character in enumerate(text):
        if escaped:
            escaped = False
            continue
        escaped = character == "\\"
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index]
    return None


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]
