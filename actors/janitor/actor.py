"""The janitor actor: when a worker is gone, its leased messages go back to their queues at once.

    presence: a process is gone --> its claims (CLAIMS) --> NAK on each acknowledgement subject --> redelivered

Without it they come back all the same, after `bus.ack_wait_s`. One janitor acts under a lease; further ones stand by. Since it
hears everybody, it also holds the roll call for those who would listen to a thousand others (herald.py).
Returning a message that its worker still processes (it was only thought dead) costs a second execution, which the
planner drops as a duplicate; nothing is lost either way.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar, Final

from nats.aio.msg import Msg

from physarum.actors.janitor.herald import Herald
from physarum.actors.leadership import leading
from physarum.actors.runtime import Actor
from physarum.actors.waiting import unless_draining
from physarum.bus.claims import ClaimRecord, claim_key
from physarum.bus.presence import Roster
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

_LOOK_S: Final = 60.0
_PAUSE_S: Final = 0.05
"""Between looks: a thousand actors change something a thousand times a second."""

Process = tuple[str, str, float]


class JanitorActor(Actor):
    """Role janitor."""

    role: ClassVar[str] = "janitor"

    async def run(self) -> None:
        self.become("standby")
        async with leading(self.context, "janitor") as lease:
            if lease is not None:
                await unless_draining(self.context, self._watch())

    async def _watch(self) -> None:
        claims: Register[ClaimRecord] = Register(self.bus, self.publisher, "claims", ClaimRecord)
        herald = Herald(self.bus)
        async with Roster(self.bus, on_change=herald.heard).open() as roster, asyncio.TaskGroup() as group:
            group.create_task(herald.run(roster), name="roll call")
            self.become("ready")
            present = _processes(roster)
            await self._return_all(claims, await self._left_behind(claims, present))
            while True:
                await roster.wait_change(_LOOK_S)
                await asyncio.sleep(_PAUSE_S)
                now = _processes(roster)
                await self._return_all(claims, present - now)
                present = now

    async def _left_behind(self, claims: Register[ClaimRecord], present: set[Process]) -> set[Process]:
        """Processes with claims that went while no janitor was there."""
        return {_process(record) for record in await claims.entries() if record.acks} - present

    async def _return_all(self, claims: Register[ClaimRecord], gone: set[Process]) -> None:
        for process in sorted(gone):
            entry = await claims.get(*claim_key(*process))
            if entry.value is None:
                continue
            for ack in entry.value.acks:
                await self.bus.client.publish(ack, Msg.Ack.Nak)
            await claims.clear(entry.revision, *claim_key(*process))
            if entry.value.acks:
                _log.warning(
                    "%s/%s is gone: %d messages that it held are returned", *process[:2], len(entry.value.acks)
                )
                self.numbers["returned"] = self.numbers.get("returned", 0) + len(entry.value.acks)
                self.progressed()


def _processes(roster: Roster) -> set[Process]:
    return {(beat.role, beat.instance, beat.started_at) for beat in roster.members}


def _process(record: ClaimRecord) -> Process:
    return record.role, record.instance, record.started_at
