"""The answer within what a policy said. Invariant: no answer is None, never an empty text that a scorer may accept."""

from __future__ import annotations

import re
from typing import Final, Literal

Extraction = Literal["tag", "number", "text"]
"""`tag`: within the last <answer>...</answer>; `number`: the last number; `text`: all of it."""

_NUMBER: Final = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def extract(text: str, how: Extraction, tag: str = "answer") -> str | None:
    """The answer, white space around it removed; None where there is none."""
    if how == "tag":
        closed = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
        found = closed[-1] if closed else ""
    elif how == "number":
        numbers = _NUMBER.findall(text)
        found = numbers[-1].rstrip(",") if numbers else ""
    else:
        found = text
    return found.strip() or None
