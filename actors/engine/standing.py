"""How far this engine has come with the newest version, for whoever asks: the WEIGHTS register, one key for each engine.

Invariant: nothing waits for it. States that follow each other faster than the bus takes them are one write, the last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal

from physarum.actors import states
from physarum.actors.context import Context
from physarum.bus.errors import BusError
from physarum.bus.register import Register
from physarum.bus.version import Version

_log = logging.getLogger(__name__)

State = Literal["announced", "staged", "verified", "canary", "live", "refused", "quarantined"]


class Standing:
    """The state of one engine."""

    def __init__(self, context: Context) -> None:
        self._engine = context.identity.instance
        self._register = Register(context.bus, context.publisher, "weights", states.Serving)
        self._newest: states.Serving | None = None
        self._changed = asyncio.Event()

    def set(self, label: str, state: State, reason: str = "") -> None:
        """From now on."""
        self._newest = states.Serving(engine=self._engine, label=label, state=state, reason=reason, at=time.time())
        self._changed.set()

    async def run(self) -> None:
        """Writes, for ever. A bus that cannot be reached costs the states of that time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        newest, self._newest = self._newest, None
        if newest is None:
            return
        try:
            await self._register.put(newest, states.ENGINE, Version.parse(newest.label).model, self._engine)
        except BusError as error:
            _log.warning("%s of %s is not recorded: %s", newest.state, newest.label, error)
