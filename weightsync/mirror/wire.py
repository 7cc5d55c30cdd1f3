"""How a bucket's process is spoken to: questions as lines of JSON, answers as a head and bytes.

Invariant: every question is answered once, in any order; its number says which.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final, Literal

import msgspec

_HEAD: Final = struct.Struct("<IBQ")
"""Number of the question, kind of the answer, bytes that follow."""

OK: Final = 0
ABSENT: Final = 1
UNFIT: Final = 2
FAILED: Final = 3
"""Another try may help; the bytes say what went wrong, as they do of ABSENT and UNFIT."""


class Question(msgspec.Struct, frozen=True):
    """`get`: the object `key`; `sizes`: JSON of what begins with it."""

    number: int
    call: Literal["get", "sizes"]
    key: str


def send_answer(out: BinaryIO, number: int, kind: int, data: bytes) -> None:
    """The caller lets nobody else write meanwhile."""
    out.write(_HEAD.pack(number, kind, len(data)))
    out.write(data)
    out.flush()


def receive_answer(source: BinaryIO) -> tuple[int, int, bytes] | None:
    """(Number, kind, bytes); None at the end, also in the middle of an answer."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    number, kind, size = _HEAD.unpack(head)
    data = source.read(size)
    return (number, kind, data) if len(data) == size else None
