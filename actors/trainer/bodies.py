"""The bodies of a step's executions, fetched beside the training of the step before, so that training does not wait for them.

At most one batch is held beside the one in training. What is not here when a step begins is fetched then; a body that was
fetched for nothing (its execution was dropped) is let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from physarum.actors.context import Context
from physarum.actors.own_samples import OwnSamples
from physarum.actors.trainer.planner import Planner
from physarum.actors.wire import read_execution
from physarum.bus import log
from physarum.bus.errors import BusError
from physarum.bus.records import Execution

_log = logging.getLogger(__name__)

_TOGETHER: Final = 64
"""Bodies asked for at once: little enough that a step that begins does not wait for it."""


class Bodies:
    """By sequence. `claim` what a plan takes at once when it is taken: the rest may be let go."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._own = OwnSamples.of(context.config)
        self._held: dict[int, Execution] = {}
        self._claimed: dict[int, Execution] = {}

    async def run(self, planner: Planner, came: asyncio.Event) -> None:
        """Fetches what the next plan will hold, as it stands, whenever something `came`; for ever."""
        while True:
            await came.wait()
            came.clear()
            await self._fetch_upcoming(planner)

    def claim(self, sequences: Iterable[int]) -> None:
        """These are wanted by a plan."""
        self._claimed = {number: self._held.pop(number) for number in sequences if number in self._held}

    async def get(self, sequences: list[int]) -> list[Execution]:
        """In the order asked for. Raises what reading the log or the blob store raises."""
        claimed, self._claimed = self._claimed, {}
        found = claimed | await self._read([number for number in sequences if number not in claimed])
        return [found[number] for number in sequences]

    async def _fetch_upcoming(self, planner: Planner) -> None:
        """Until the next batch is here as far as it is complete; what comes meanwhile is looked for, too."""
        while True:
            upcoming = planner.upcoming()
            self._held = {number: self._held[number] for number in upcoming if number in self._held}
            missing = [number for number in upcoming if number not in self._held]
            if not missing:
                return
            try:
                self._held |= await self._read(missing[:_TOGETHER])
            except BusError as error:
                _log.warning("bodies are not fetched ahead now, their step will: %s", error)
                return

    async def _read(self, sequences: list[int]) -> dict[int, Execution]:
        entries = await log.get_many(self._context.bus, "samples", sequences)
        return {
            entry.sequence: self._own.execution(await read_execution(self._context, entry.headers, entry.data))
            for entry in entries
        }
