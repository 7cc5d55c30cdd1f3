"""The trainer's side of broadcasts: each version goes to the engines that take part, beside its way to the host.

Never a reason to wait or to fail: a round has a deadline, and who did not get the version in it fetches it. After a failed
round the next one has a new group of those who are there then.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import sys
import time
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

from physarum.actors.context import Context
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
        self._members: tuple[str, ...] = ()
        self._groups = count(1)
        self._name, self._port = "", 0

    async def send(self, version: Version, buffer: FlatBuffer, engines: Roster) -> None:
        """Returns when the round is over."""
        members = tuple(sorted(beat.instance for beat in engines.members if MEMBER_FACT in beat.facts))
        if not members:
            return
        try:
            if members != self._members:
                await self._form(version, members, buffer)
            await self._round(version, buffer)
        except DeviceError as error:
            self._members = ()
            _log.warning("%s was not broadcast to all of %s, who fetch it: %s", version, ", ".join(members), error)

    async def close(self) -> None:
        await in_thread(self._agent.close)

    async def _form(self, version: Version, members: tuple[str, ...], buffer: FlatBuffer) -> None:
        """A new process: nothing of an old group can hold it up."""
        await in_thread(self._agent.close)
        self._members, self._name = members, f"{version.epoch}.{next(self._groups)}"
        answer = await in_thread(self._agent.call, "open", self._timeout_s, host=self._host)
        self._port = int(answer["port"])
        memory = await asyncio.to_thread(adopted, buffer)
        await in_thread(self._agent.call, "adopt", self._timeout_s, buffer=memory)

    async def _round(self, version: Version, buffer: FlatBuffer) -> None:
        until = time.time() + self._timeout_s
        one = Round(
            name=self._name,
            epoch=version.epoch,
            label=str(version),
            host=self._host,
            port=self._port,
            members=self._members,
            until=until,
        )
        await self._rounds.put(one, ROUND, version.model)
        arguments: dict[str, Any] = {
            "name": self._name,
            "label": str(version),
            "layout": buffer.layout(),
            "size": buffer.size_bytes,
            "members": len(self._members),
            "timeout_s": self._timeout_s,
        }
        answer = await in_thread(self._agent.call, "send", 2 * self._timeout_s, arguments=arguments)
        await self._context.emit(
            "broadcast",
            {
                "version": str(version),
                "seconds": answer["seconds"],
                "bytes": answer["bytes"],
                "engines": len(self._members),
            },
        )


def adopted(buffer: FlatBuffer) -> str:
    """Of the trainer's own memory, for the agent on its host; not the bytes."""
    assert buffer.memory is not None
    return base64.b64encode(bytes(ForkingPickler.dumps(buffer.memory))).decode()
