"""A receiver serves what it brings to its host, and asks other hosts' receivers before the service: the nearest first.

Only where weights travel between hosts, which is where requests must carry a token (`checkpoint.token_env`). Engines of one
host share its memory and need nothing of this. `PHYSARUM_RACK` names the rack of a host; engines of the same one come first.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from physarum.actors.address import http_url
from physarum.actors.context import Context
from physarum.bus.presence import Heartbeat, Roster
from physarum.configs.secrets import read_secret
from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.holdings import Holdings

CHUNKS_FACT: Final = "chunks"
RACK_FACT: Final = "rack"
_RACK: Final = "PHYSARUM_RACK"
_EVERYWHERE: Final = "0.0.0.0"
_MOST_PEERS: Final = 4
"""Of which each chunk is asked for before the service: more cost more refusals than they save."""


class Relay:
    """Of one engine actor. `facts` are what it announces while it runs."""

    def __init__(self, context: Context, carrier: Carrier | None) -> None:
        self.holdings = Holdings()
        self.carrier = carrier
        self.facts: dict[str, str] = {}
        self._context = context
        self._token = read_secret(context.config.checkpoint.token_env)
        self._rack = os.environ.get(_RACK, "")
        self._peers: Roster | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serves until its end; nothing where weights do not travel."""
        if self._token is None:
            yield
            return
        async with AsyncExitStack() as stack:
            server = DataServer(self.holdings, self._token, _EVERYWHERE, self.carrier)
            await server.start()
            stack.push_async_callback(server.close)
            self._peers = await stack.enter_async_context(Roster(self._context.bus, "engine").open())
            self.facts = {
                CHUNKS_FACT: http_url(self._context.address, server.port),
                RACK_FACT: self._rack,
            }
            yield

    async def close(self) -> None:
        """After its receiver: what that reads into is registered with the carrier."""
        if self.carrier is not None:
            await asyncio.to_thread(self.carrier.close)

    def peers(self, same_rack: bool = False) -> list[str]:
        """Where to ask for a chunk before the service, in this order; `same_rack`: nobody else, who may be out of reach."""
        members = self._peers.members if self._peers is not None else []
        if same_rack:
            members = [beat for beat in members if self._rack and beat.facts.get(RACK_FACT) == self._rack]
        return nearest(members, self._context.host, self._rack)


def nearest(members: list[Heartbeat], host: str, rack: str) -> list[str]:
    """Addresses of receivers on other hosts than `host`, those of the same rack first, else in no order."""
    others = [beat.facts for beat in members if CHUNKS_FACT in beat.facts and beat.host != host]
    random.shuffle(others)
    others.sort(key=lambda facts: not rack or facts.get(RACK_FACT) != rack)
    return [str(facts[CHUNKS_FACT]) for facts in others[:_MOST_PEERS]]
