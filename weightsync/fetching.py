"""Brings a version to a host that has it not: chunk by chunk from whoever holds it, into the host's area.

Chunks that the version before it had are copied on the host, all others are fetched, all are verified. One receiver of a
host fetches; what it brought is everybody's there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Final

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.carriers.carrier import Carrier, Place
from physarum.weightsync.carriers.reading import CarriedReader
from physarum.weightsync.carriers.ticket import Ticket, chunk_offsets
from physarum.weightsync.chunk_reader import ChunkReader, Reader
from physarum.weightsync.chunk_threads import ChunkQueue, ChunkThread, FillWork
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import (
    CarrierError,
    ChunkAlteredError,
    ChunkMissingError,
    ManifestError,
)
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.holdings import Holdings
from physarum.weightsync.layout import Form, Layout, lay_out
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mappings import memory_of
from physarum.weightsync.mirror.reading import Mirror, MirrorHolder
from physarum.weightsync.pace import Pace
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.service_client import CheckpointClient

_log = logging.getLogger(__name__)

_FILLING: Final = "fetch-"
PEER_TIMEOUT_S: Final = 5.0
"""For a chunk from another receiver: one that hangs must not delay this one; the service has the chunk, too."""
_GIVE_BACK_S: Final = 2.0
"""All chunks are there: a holder that does not hear it must not delay the version."""


class Fetch:
    """One version on its way. `fetched` and `reused` are bytes, by where they came from."""

    def __init__(
        self,
        area: SharedArea,
        manifest: Manifest,
        base: Manifest | None,
        concurrency: int,
        holdings: Holdings | None = None,
        pace: Pace | None = None,
        carrier: Carrier | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self._holdings = holdings if holdings is not None else Holdings()
        self._offers = holdings is not None
        self.fetched = 0
        self.reused = 0
        self.altered = 0
        self._area = area
        self._manifest = manifest
        self._base = base
        self._concurrency = concurrency
        self._pace = pace if pace is not None else Pace()
        self._carrier = carrier
        self._mirror = mirror
        self._layout = lay_out({one.name: Form(one.dtype, one.shape) for one in manifest.tensors}, manifest.label)
        self._places = places_in(manifest, self._layout)

    async def run(self, sources: Sequence[CheckpointClient], peers: Sequence[CheckpointClient] = ()) -> HeldFile:
        """The version, held by the area; each chunk is looked for at `peers` (other hosts' receivers) before the sources, in
        the mirror after them. Raises what the last source of a chunk failed with, or NoRoomError."""
        name = f"{_FILLING}{self._manifest.label}"
        await in_thread(self._area.clear_abandoned, _FILLING)
        filling = await in_thread(self._area.begin, name)
        try:
            await in_thread(filling.write, self._layout.header, 0)
            await self._fill(filling, sources, peers)
            await in_thread(filling.finish, self._layout.size_bytes)
            file = await in_thread(self._hold, name)
        except BaseException:
            self._holdings.close()
            filling.discard()
            raise
        filling.close()
        if not self._offers:  # nobody else would let go of the file, and its memory with it
            self._holdings.close()
        return file

    def _hold(self, name: str) -> HeldFile:
        self._area.hold(name, self._manifest.label)
        file = HeldFile.open(self._area, self._manifest.label)
        if file is None:
            raise ChunkMissingError(f"{self._manifest.label} was fetched and given up at once: it is no longer wanted")
        return file

    async def _fill(
        self, filling: Filling, sources: Sequence[CheckpointClient], peers: Sequence[CheckpointClient]
    ) -> None:
        """Threads share one iterator, so as many chunks are under way as there are threads. The first failure ends all."""
        memory = await in_thread(self._memory, filling)
        self._holdings.begin(self._manifest, filling.descriptor)
        base, known = await in_thread(self._open_base)
        before = _before(self._manifest, self._base) if base is not None and self._base is not None else {}
        work = FillWork(filling, memory, self._places, base, known, before, self._holdings.add)
        try:
            holders = await _holders(sources, peers)
            async with self._carried(holders, memory) as carried:
                mirror = self._mirror.holder(self._manifest) if self._mirror is not None else None
                await self._run(work, [_readers(holders, carried, mirror) for _ in range(self._concurrency)])
        finally:
            if base is not None:
                base.close()

    async def _run(self, work: FillWork, readers: Sequence[Sequence[Reader]]) -> None:
        """A thread for each set of readers."""
        threads = [ChunkThread(work, own, self._pace) for own in readers]
        queue = ChunkQueue(self._manifest.sizes())
        # Threads of their own: they wait for others, and must not keep this process's from its work.
        pool = ThreadPoolExecutor(len(threads), thread_name_prefix="fetch")
        try:
            await asyncio.gather(*(asyncio.wrap_future(pool.submit(thread.run, queue)) for thread in threads))
        finally:
            queue.end()
            for thread in threads:
                thread.close()
            await in_thread(pool.shutdown)
            for thread in threads:
                self.fetched += thread.fetched
                self.reused += thread.reused
                self.altered += thread.altered

    @asynccontextmanager
    async def _carried(
        self, holders: Sequence[CheckpointClient], memory: memoryview
    ) -> AsyncIterator[dict[str, CarriedReader]]:
        """What reads out of the memory of those holders that issue tickets, by their address; until its end the memory that is
        filled is registered for that. Tickets are given back then."""
        carrier, tickets = self._carrier, await self._tickets(holders)
        usable = {
            holder.url: CarriedReader(
                holder.url, carrier, one, chunk_offsets(self._manifest, one.offsets), holder.timeout_s
            )
            for holder, one in tickets
            if carrier is not None and one.carrier == carrier.name
        }
        place = await self._registered(memory) if usable else None
        if carrier is None or place is None:
            yield {}
        else:
            try:
                yield usable
            finally:
                await in_thread(carrier.unregister, place)
        ended = [holder for holder, _ in tickets if holder.url not in usable or not usable[holder.url].failed]
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await asyncio.gather(*(holder.give_back(self._manifest.label) for holder in ended))

    async def _registered(self, memory: memoryview) -> Place | None:
        if self._carrier is None:
            return None
        try:
            return await in_thread(self._carrier.register, memory)
        except CarrierError as error:
            _log.warning("%s is fetched by HTTP: %s", self._manifest.label, error)
            return None

    async def _tickets(self, holders: Sequence[CheckpointClient]) -> list[tuple[CheckpointClient, Ticket]]:
        if self._carrier is None:
            return []
        tickets = await asyncio.gather(*(holder.ticket(self._manifest.label) for holder in holders))
        return [(holder, one) for holder, one in zip(holders, tickets, strict=True) if one is not None]

    def _memory(self, filling: Filling) -> memoryview:
        """All of the file, to be written in place."""
        filling.reserve(self._layout.size_bytes)
        return memoryview(memory_of(filling.descriptor, writable=True))

    def _open_base(self) -> tuple[HeldFile | None, dict[str, tuple[int, int]]]:
        """The version before, and where its chunks are; nothing, where it is not here or damaged."""
        if self._base is None:
            return None, {}
        file = None
        try:
            file = HeldFile.open(self._area, self._base.label)
            return file, file.places(self._base) if file is not None else {}
        except (ChunkAlteredError, ManifestError) as error:
            _log.warning("nothing of %s is used again: %s", self._base.label, error)
            if file is not None:
                file.close()
            return None, {}


async def _holders(sources: Sequence[CheckpointClient], peers: Sequence[CheckpointClient]) -> list[CheckpointClient]:
    """Where chunks are served, in the order in which each is asked for: other receivers, then the sources."""
    urls = await asyncio.gather(*(source.data_url() for source in sources))
    served = zip(urls, sources, strict=True)
    return [*peers, *(CheckpointClient(url, one.token, one.session, one.timeout_s) for url, one in served)]


def _readers(
    holders: Sequence[CheckpointClient], carried: Mapping[str, Reader], mirror: MirrorHolder | None
) -> list[Reader]:
    """Of one thread: for each holder what reads its memory, if it can, and HTTP; the object store last."""
    readers: list[Reader] = []
    for one in holders:
        if one.url in carried:
            readers.append(carried[one.url])
        readers.append(ChunkReader(one.url, one.token, one.timeout_s))
    return readers if mirror is None else [*readers, mirror.reader()]


def places_in(manifest: Manifest, layout: Layout) -> dict[str, list[int]]:
    """Every offset at which a chunk stands."""
    places: dict[str, list[int]] = {}
    for tensor in manifest.tensors:
        start = layout.offsets[tensor.name]
        for chunk in tensor.chunks:
            places.setdefault(chunk.digest, []).append(start)
            start += chunk.size
    return places


def _before(manifest: Manifest, base: Manifest) -> dict[str, tuple[str, int]]:
    """The chunk that stood in `base` where each chunk of `manifest` stands, and the bytes of an element of its tensor."""
    old = {tensor.name: tensor for tensor in base.tensors}
    found: dict[str, tuple[str, int]] = {}
    for tensor in manifest.tensors:
        same = old.get(tensor.name)
        if same is None or (same.dtype, same.shape) != (tensor.dtype, tensor.shape):
            continue
        width = by_name(tensor.dtype).size_bytes
        for new, before in zip(tensor.chunks, same.chunks, strict=False):
            if new.size == before.size and new.digest != before.digest:
                found.setdefault(new.digest, (before.digest, width))
    return found
