"""What a person decided about dead letters: a mark in the RUN register under `dead.<sequence in DEAD>`.

DEAD itself is a log that the source and the trainer follow without gaps, so nothing is ever taken out of it.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from physarum.actors.states import DEAD_MARK
from physarum.bus import names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of, subject_of
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

Action = Literal["retried", "dropped"]


class DeadMark(msgspec.Struct, frozen=True):
    """What was decided about a letter, and when (Unix seconds)."""

    action: Action
    at: float


async def read_marks(bus: Bus) -> dict[int, DeadMark]:
    """Every mark, by the letter's sequence in DEAD."""
    prefix = names.subject(bus.run, "run", DEAD_MARK)
    found = await last_of(bus, names.stream(bus.run, "run"), f"{prefix}.*")
    return {int(subject_of(one).removeprefix(f"{prefix}.")): decode(one.data, DeadMark) for one in found if one.data}


async def write_mark(bus: Bus, publisher: Publisher, letter: int, action: Action) -> None:
    """Decides about the letter with this sequence; a later decision takes the place of an earlier one."""
    marks: Register[DeadMark] = Register(bus, publisher, "run", DeadMark)
    await marks.put(DeadMark(action, time.time()), DEAD_MARK, str(letter))
