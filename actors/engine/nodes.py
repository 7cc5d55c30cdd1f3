"""One engine over several hosts: node 0 is the engine, with its identity and its HTTP server; further nodes follow it.

    node actors wait --all there--> the engine announces (address, attempt) --> every node starts its part of that attempt
    a part ends, or its actor --> the engine is started anew, under another attempt --> every other part is ended, and waits

Invariant: the parts that compute together are those of one attempt, and a new one begins when no part of an old one is left.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from physarum.actors.address import http_url
from physarum.actors.engine.port import ReservedPort
from physarum.actors.errors import ActorError
from physarum.bus.presence import Heartbeat, Roster

ROLE: Final = "node"
ENGINE_FACT: Final = "engine"
ATTEMPT_FACT: Final = "attempt"
RENDEZVOUS_FACT: Final = "rendezvous"
_LOOPBACK: Final = "127.0.0.1"


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the nodes of one attempt meet: HOST:PORT of node 0."""

    address: str
    attempt: str


def name_of(engine: str, rank: int) -> str:
    """The instance of an engine's node: `policy-0-node-1`."""
    return f"{engine}-node-{rank}"


def engine_of(instance: str) -> tuple[str, int]:
    """The engine and the rank of a node. Raises ValueError for another name."""
    engine, _, rank = instance.rpartition("-node-")
    if not engine or not rank.isdigit():
        raise ValueError(f"{instance!r} is no node of an engine; expected ENGINE-node-RANK")
    return engine, int(rank)


def node_arguments(nodes: int, rank: int, address: str) -> dict[str, Any]:
    """What SGLang is told of its place among the nodes."""
    return {"nnodes": nodes, "node-rank": rank, "dist-init-addr": address}


class Nodes:
    """The other nodes of `engine`, as it sees them on presence; `roster` (role node) sets `changed`."""

    def __init__(
        self, roster: Roster, changed: asyncio.Event, engine: str, nodes: int, host: str, address: str | None = None
    ) -> None:
        """`host`: whose nodes meet on loopback; `address`: where nodes of other hosts reach this one (None: by its name)."""
        self._roster, self._changed = roster, changed
        self._names = [name_of(engine, rank) for rank in range(1, nodes)]
        self._nodes, self._host, self._address = nodes, host, address or host
        self._port: ReservedPort | None = None
        self._attempt = ""

    @property
    def count(self) -> int:
        return self._nodes

    async def meet(self, timeout_s: float) -> Rendezvous:
        """Waits until every node is there with nothing of an earlier attempt. Raises ActorError naming who is not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: all(self._is_free(name) for name in self._names))
        except TimeoutError as error:
            missing = [name for name in self._names if not self._is_free(name)]
            raise ActorError(
                f"no engine without all of its nodes: {', '.join(missing)} did not wait for it within {timeout_s:g} s; see"
                " their logs, or raise engines.<group>.start_timeout_s"
            ) from error
        hosts = {beat.host for beat in self._present().values()}
        self._port, self._attempt = ReservedPort(), uuid.uuid4().hex
        address = _LOOPBACK if hosts <= {self._host} else self._address
        return Rendezvous(address=http_url(address, self._port.number).removeprefix("http://"), attempt=self._attempt)

    def close(self) -> None:
        """Gives the port up; node 0 has ended. While it lives its own socket is bound there beside ours."""
        if self._port is not None:
            self._port.close()

    async def lost(self) -> str:
        """Returns the name of the first node that was in this attempt and is not any more."""
        joined: set[str] = set()
        gone: list[str] = []

        def look() -> bool:
            present = self._present()
            within = {name for name, beat in present.items() if beat.facts.get(ATTEMPT_FACT) == self._attempt}
            gone.extend(sorted(joined - within))
            joined.update(within)
            return bool(gone)

        await self._until(look)
        return gone[0]

    def _present(self) -> dict[str, Heartbeat]:
        return {beat.instance: beat for beat in self._roster.members if beat.instance in self._names}

    def _is_free(self, name: str) -> bool:
        beat = self._present().get(name)
        return beat is not None and not beat.facts.get(ATTEMPT_FACT)

    async def _until(self, satisfied: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            if satisfied():
                return
            await self._changed.wait()
