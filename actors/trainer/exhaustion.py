"""Whether anything can still come: the end of a small data set must end the run, not leave it waiting for a full batch.

The source says in its position that it has issued all it ever will; what it issued moves TASKS -> EPISODES -> SAMPLES (or
DEAD) and is stored in the next before it leaves the one before. So the streams are looked at in that order: when the
first ones are empty and the last ones are read to their ends, nothing is under way.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.states import SourcePosition
from physarum.actors.waiting import until
from physarum.bus import log, names
from physarum.bus.connection import Bus
from physarum.bus.ledger import RefillRecord
from physarum.bus.names import StreamKey

_FIRST_LOOK_S: Final = 0.1
_LONGEST_LOOK_S: Final = 2.0


class Taken(Protocol):
    """How far somebody has read SAMPLES and DEAD; `changed` wakes it, `refills` it still has to ask for."""

    changed: asyncio.Event
    samples_through: int
    dead_through: int
    refills: list[RefillRecord]


class Exhaustion:
    """Follows the source's position. `intake.changed` is set when the source is finished."""

    def __init__(self, context: Context, intake: Taken) -> None:
        self._context, self._intake = context, intake
        self._position: SourcePosition | None = None
        self._look_s = _FIRST_LOOK_S

    async def follow(self) -> None:
        """Until the source is finished, and on while it moves after that (refills)."""
        register = self._context.run_register(SourcePosition)
        key = (states.SOURCE_POSITION, self._context.config.source.name)
        while True:
            self._position = await until(register, self._is_news, *key)
            self._intake.changed.set()

    def _is_news(self, position: SourcePosition) -> bool:
        return position.finished and position != self._position

    @property
    def source_ended(self) -> bool:
        """Whether the source has issued all it will, but for refills."""
        return self._position is not None

    @property
    def look_again_s(self) -> float | None:
        """When to look again; None while the source has rows left.

        A bounded backoff: the last message's acknowledgement, which empties its queue, comes after the sample that it
        caused and announces itself to nobody.
        """
        if self._position is None:
            return None
        self._look_s, now_s = min(_LONGEST_LOOK_S, 2 * self._look_s), self._look_s
        return now_s

    async def reached(self, refills_asked: int) -> bool:
        """Whether no execution is under way any more and everything that came was taken in."""
        position = self._position
        if position is None or position.refills < refills_asked or self._intake.refills:
            return False
        bus = self._context.bus
        episodes = map(names.training, self._context.config.reward.partitions)
        if await _any(bus, "tasks", *_training_classes()) or await _any(bus, "episodes", *episodes):
            return False
        dead, samples = await log.state(bus, "dead"), await log.state(bus, "samples")
        return dead.last <= self._intake.dead_through and samples.last <= self._intake.samples_through


def _training_classes() -> tuple[str, ...]:
    return tuple(name for name in names.TASK_CLASSES if name != "eval")


async def _any(bus: Bus, key: StreamKey, *kinds: str) -> bool:
    """Whether the stream holds a message of any of these kinds."""
    found = await asyncio.gather(*(log.first(bus, key, f"{names.subject(bus.run, key, kind)}.>") for kind in kinds))
    return any(entry is not None for entry in found)
