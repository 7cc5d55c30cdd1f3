"""Holds the roll call (bus/rollcall.py) of the roles that many listen to, from the janitor's own view of everybody.

Invariant: one herald speaks, whoever has the janitor's lease; when none does, listeners read what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from physarum.bus import names
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.names import RUN_HEADER
from physarum.bus.presence import TICK_S, Roster
from physarum.bus.rollcall import Teller

ROLES: Final = ("engine", "rollout")
"""Every rollout actor listens to both, every engine to the engines."""


class Herald:
    """`heard` is to be called whenever the roster changed."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._teller = Teller(ROLES)
        self._changed = asyncio.Event()

    def heard(self) -> None:
        self._changed.set()

    async def run(self, roster: Roster) -> None:
        """Tells what is to be told, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            await asyncio.sleep(self._teller.soon_s)
            self._changed.clear()
            for role, call in self._teller.look(roster.members):
                subject = names.rollcall_subject(self._bus.run, role)
                await self._bus.client.publish(subject, encode(call), headers={RUN_HEADER: self._bus.run})
