"""The trainer's side of broadcasts: each version goes to the engines that take part, beside its way to the host.

    engines come or go --> their group is formed, beside publications --> each version is one round
    a round fails, or one of its engines leaves --> a new group is formed of those who are there, and nobody waits for the old

Never a reason to wait or to fail: while a group is formed versions are fetched, a round has a deadline and ends at once when
somebody leaves, and who did not get the version in it fetches it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
import time
from collections.abc import Iterable
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

from physarum.actors.context import Context
from physarum.actors.waiting import done_while
from physarum.bus.presence import Roster
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.weightsync.broadcast import MEMBER_FACT, ROUND, Round
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.parallel import in_thread

_log = logging.getLogger(__name__)

_LOOPBACK: Final = "127.0.0.1"

Members = tuple[tuple[str, float], ...]
"""By instance and start (Unix seconds): an engine that was started anew is in no old group."""


class Broadcasting:
    """Sends what is in `buffer`. Use as one task at a time."""

    def __init__(self, context: Context, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        # As the weights service: other hosts are let in where requests must carry a token.
        self._host = context.address if context.config.checkpoint.token_env else _LOOPBACK
        log_file = context.folder.logs / f"{context.identity.instance}.weights.log"
        self._agent = DeviceAgent(Path(sys.executable), os.environ, log_file, timeout_s)
        self._rounds = Register(context.bus, context.publisher, "weights", Round)
        self._members: Members = ()
        self._forming: asyncio.Task[int] | None = None
        self._groups = count(1)
        self._name, self._port = "", 0

    async def send(self, version: Version, buffer: FlatBuffer, engines: Roster) -> None:
        """Returns when the round is over; at once while the group is formed."""
        members = members_of(engines)
        if not members:
            return
        try:
            if await self._formed(version, members, buffer):
                await self._round(version, buffer, engines)
        except DeviceError as error:
            _log.warning("%s was not broadcast to all of %s, who fetch it: %s", version, _names(members), error)
            await self._begin(version, members_of(engines), buffer)

    async def close(self) -> None:
        await self._disband()

    async def _formed(self, version: Version, members: Members, buffer: FlatBuffer) -> bool:
        """Whether the group of `members` is there; begins it where it is not. Raises DeviceError when that failed."""
        if members != self._members:
            await self._begin(version, members, buffer)
        if self._forming is None:
            return True
        if not self._forming.done():
            return False
        forming, self._forming = self._forming, None
        self._port = forming.result()
        return True

    async def _begin(self, version: Version, members: Members, buffer: FlatBuffer) -> None:
        await self._disband()
        self._members, self._name = members, f"{version.epoch}.{next(self._groups)}"
        if members:
            self._forming = asyncio.create_task(self._form(version, buffer), name=f"form group {self._name}")

    async def _disband(self) -> None:
        """What hangs in the agent ends with it."""
        await in_thread(self._agent.close)
        forming, self._forming = self._forming, None
        if forming is not None:
            forming.cancel()
            await asyncio.wait({forming})
            await in_thread(self._agent.close)  # it may have been at the point of starting one

    async def _form(self, version: Version, buffer: FlatBuffer) -> int:
        """A new process: nothing of an old group can hold it up. The port at which the group meets."""
        await self._rounds.put(self._told(version, port=0, gathers=True), ROUND, version.model)
        answer = await in_thread(self._agent.call, "open", self._timeout_s, host=self._host)
        memory = await asyncio.to_thread(adopted, buffer)
        await in_thread(self._agent.call, "adopt", self._timeout_s, buffer=memory)
        return int(answer["port"])

    def _told(self, version: Version, port: int, gathers: bool = False) -> Round:
        """What the members are told."""
        return Round(
            name=self._name,
            epoch=version.epoch,
            label=str(version),
            host=self._host,
            port=port,
            members=tuple(instance for instance, _ in self._members),
            until=time.time() + self._timeout_s,
            gathers=gathers,
        )

    async def _round(self, version: Version, buffer: FlatBuffer, engines: Roster) -> None:
        await self._rounds.put(self._told(version, self._port), ROUND, version.model)
        arguments: dict[str, Any] = {
            "name": self._name,
            "label": str(version),
            "layout": buffer.layout(),
            "size": buffer.size_bytes,
            "members": len(self._members),
            "timeout_s": self._timeout_s,
        }
        answer = await self._unless_left(
            asyncio.create_task(in_thread(self._agent.call, "send", 2 * self._timeout_s, arguments=arguments)), engines
        )
        await self._context.emit(
            "broadcast",
            {
                "version": str(version),
                "seconds": answer["seconds"],
                "bytes": answer["bytes"],
                "engines": len(self._members),
            },
        )

    async def _unless_left(self, sending: asyncio.Task[dict[str, Any]], engines: Roster) -> dict[str, Any]:
        """The agent's answer. Raises DeviceError when it fails, or when a member is no longer there: it would be waited for."""
        try:
            if not await done_while(sending, engines, lambda: not self._left(engines), self._timeout_s):
                left = self._left(engines)
                await in_thread(self._agent.close)
                await asyncio.wait({sending})
                if sending.exception() is not None:
                    raise DeviceError(f"{_names(left)} left while it was under way")
            return sending.result()
        finally:
            sending.cancel()

    def _left(self, engines: Roster) -> list[tuple[str, float]]:
        there = members_of(engines)
        return [one for one in self._members if one not in there]


def members_of(engines: Roster) -> Members:
    """Those whose agents take part."""
    return tuple(sorted((one.instance, one.started_at) for one in engines.members if MEMBER_FACT in one.facts))


def _names(members: Iterable[tuple[str, float]]) -> str:
    return ", ".join(instance for instance, _ in members)


def adopted(buffer: FlatBuffer) -> str:
    """Of the trainer's own memory, for the agent on its host; not the bytes."""
    assert buffer.memory is not None
    return base64.b64encode(bytes(ForkingPickler.dumps(buffer.memory))).decode()
