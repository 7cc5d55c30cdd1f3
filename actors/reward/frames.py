"""What actor and hook process say to each other: frames of a length (4 bytes, little-endian) and MessagePack.

Invariant: each call gets one reply, after a first frame that says whether the hook imports; where one call runs at a time,
replies come in the order of the calls.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

LENGTH: Final = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Score what `bodies` hold: executions in their wire form, one unless the hook scores groups."""

    number: int
    bodies: list[bytes]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The hook is imported; calls may come."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hook cannot be used at all: it does not import, or does not take its arguments."""

    reason: str


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The hook's value: plain numbers, mappings and lists, not yet checked."""

    number: int
    value: Any


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The hook raised: exception, message and the place of the last traceback line. `unavailable`: a service that it asks
    did not answer."""

    number: int
    reason: str
    unavailable: bool = False


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The hook returned something without a wire form."""

    number: int
    reason: str


class Overdue(msgspec.Struct, frozen=True, tag="overdue"):
    """The hook waited for longer than its deadline and was cancelled; its process goes on."""

    number: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook process may take: `concurrency` calls at once, each `timeout_s` long; memory by its own (address space) and
    with all that it started (`total_bytes`, resident), None: no limit; and `children` processes beside it."""

    timeout_s: float
    concurrency: int = 1
    memory_bytes: int | None = None
    total_bytes: int | None = None
    children: int = 1024
    grouped: bool = False
    """The hook is given a list of executions."""


Reply = Ready | Refused | Returned | Raised | Unusable | Overdue
Answered = Returned | Raised | Unusable | Overdue

_encoder: Final = msgspec.msgpack.Encoder()
_replies: Final = msgspec.msgpack.Decoder(Reply)
_calls: Final = msgspec.msgpack.Decoder(Call)


def frame(message: Call | Reply) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read_reply(body: bytes) -> Reply:
    """Raises msgspec.DecodeError."""
    return _replies.decode(body)


def read_call(body: bytes) -> Call:
    """Raises msgspec.DecodeError."""
    return _calls.decode(body)
