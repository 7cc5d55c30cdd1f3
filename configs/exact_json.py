"""JSON of data: a whole number that neither orjson nor the wire can hold (64 bits) stays what was written, as text.

orjson reads 123456789012345678901234567890 as 1.2345678901234568e+29, and no right answer equals that.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

_LONG: Final = re.compile(rb"\d{19}")
_DIGITS: Final = 20
"""Of the largest whole number of 64 bits; its sign is one more."""


def loads(text: bytes | str) -> Any:
    """As orjson.loads, and as strict. Raises orjson.JSONDecodeError."""
    found = orjson.loads(text)
    data = text.encode() if isinstance(text, str) else text
    return json.loads(data, parse_int=_whole) if _LONG.search(data) else found


def _whole(digits: str) -> int | str:
    if len(digits) > _DIGITS:
        return digits
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits
