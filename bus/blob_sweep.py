"""Mark and sweep: what no message refers to goes away, after a grace. Nothing counts references, so no count can be wrong.

    list every store --> ripe: unchanged for `grace_s` --> mark: read every reference --> condemned: ripe and not marked
    the next sweep: the same again --> remove what was condemned by both

Invariants: the list is made before the mark, and a removal takes only what is still as it was listed, so a blob that is
stored during a sweep, or before a sweeper was paused, is never removed by it. Age is measured by this process's own clock
from the first list that showed the blob: no clock that was set makes anything older. A mark that is not complete raises,
and nothing is removed. Two marks must agree, because a replica of a stream may show a message later than its leader does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from physarum.bus import names
from physarum.bus.connection import Bus
from physarum.bus.direct import matching
from physarum.bus.errors import BusError
from physarum.bus.names import StreamKey

_log = logging.getLogger(__name__)

STREAMS: tuple[StreamKey, ...] = ("tasks", "episodes", "evals", "dead", "samples")
"""In the order in which a reference moves from one to another (a leased message stays in its stream): whatever moves while
they are read is met in the later one. SAMPLES moves on to the archive, which is read after them."""

Mark = Callable[[], Awaitable[set[str]]]
"""Every digest that something refers to; raises when it cannot name them all."""


class SweptStore(Protocol):
    """What a sweep needs of a store; `blob_remote.RemoteStore` is one."""

    identity: str

    async def listing(self) -> dict[str, int]:
        """Name to modification time in ns."""

    async def remove(self, listed: Mapping[str, int]) -> int:
        """Removes what is still as it was listed; the bytes freed."""


async def referenced(bus: Bus) -> set[str]:
    """The blobs that messages of the run refer to now. Reads subjects only: such a message has no body."""
    found: set[str] = set()
    for key in STREAMS:
        async for message in matching(bus, names.stream(bus.run, key), names.references(bus.run, key)):
            digest = names.referenced((message.headers or {})["Nats-Subject"])
            if digest is not None:
                found.add(digest)
    return found


class Sweeper:
    """Remembers since when each blob of each store has been as it is. `clock`: monotonic seconds."""

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._since: dict[str, dict[str, tuple[int, float]]] = {}
        self._condemned: dict[str, dict[str, int]] = {}

    async def sweep(self, stores: Iterable[SweptStore], mark: Mark) -> int:
        """One sweep of the stores that answer; the bytes freed. Raises what `mark` raises."""
        ripe = [(store, listed) for store in stores if (listed := await self._ripe(store))]
        if not ripe:
            return 0
        live = await mark()
        freed = 0
        for store, listed in ripe:
            before = self._condemned.get(store.identity, {})
            condemned = {name: changed_ns for name, changed_ns in listed.items() if name not in live}
            self._condemned[store.identity] = condemned
            twice = {name: changed_ns for name, changed_ns in condemned.items() if before.get(name) == changed_ns}
            if twice:
                freed += await _remove(store, twice)
        return freed

    async def _ripe(self, store: SweptStore) -> dict[str, int]:
        """What has not changed in the store for the grace."""
        try:
            listed = await store.listing()
        except BusError as error:
            _log.warning("blob store %s is not swept this time: %s", store.identity, error)
            return {}
        now, before = self._clock(), self._since.get(store.identity, {})
        since: dict[str, tuple[int, float]] = {}
        for name, changed_ns in listed.items():
            seen = before.get(name)
            since[name] = seen if seen is not None and seen[0] == changed_ns else (changed_ns, now)
        self._since[store.identity] = since
        return {name: changed_ns for name, (changed_ns, first) in since.items() if now - first >= self._grace_s}


async def _remove(store: SweptStore, garbage: Mapping[str, int]) -> int:
    try:
        freed = await store.remove(garbage)
    except BusError as error:
        _log.warning("blob store %s is not swept this time: %s", store.identity, error)
        return 0
    _log.info("blob store %s: %d bytes freed, of %d blobs that nothing refers to", store.identity, freed, len(garbage))
    return freed
