"""Brings a version to a host that has it not: chunk by chunk from whoever holds it, into the host's area.

Chunks that the version before it had are copied on the host, all others are fetched, all are verified. One receiver of a
host fetches; what it brought is everybody's there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.chunk_reader import ChunkReader
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ManifestError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.holdings import Holdings
from physarum.weightsync.layout import Form, Layout, lay_out
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mappings import memory_of
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.service_client import CheckpointClient

_log = logging.getLogger(__name__)

_FILLING: Final = "fetch-"
_PEER_TIMEOUT_S: Final = 5.0
"""For a chunk from another receiver: one that hangs must not delay this one; the service has the chunk, too."""


class Fetch:
    """One version on its way. `fetched` and `reused` are bytes, by where they came from."""

    def __init__(
        self,
        area: SharedArea,
        manifest: Manifest,
        base: Manifest | None,
        concurrency: int,
        holdings: Holdings | None = None,
    ) -> None:
        self._holdings = holdings if holdings is not None else Holdings()
        self.fetched = 0
        self.reused = 0
        self.altered = 0
        self._area = area
        self._manifest = manifest
        self._base = base
        self._concurrency = concurrency
        self._layout = lay_out({one.name: Form(one.dtype, one.shape) for one in manifest.tensors}, manifest.label)
        self._places = _places(manifest, self._layout)

    async def run(self, sources: Sequence[CheckpointClient], peers: Sequence[str] = ()) -> HeldFile:
        """The version, held by the area; each chunk is looked for at `peers` (addresses of other hosts' receivers) before the
        sources. Raises what the last source of a chunk failed with, or NoRoomError."""
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
        return file

    def _hold(self, name: str) -> HeldFile:
        self._area.hold(name, self._manifest.label)
        file = HeldFile.open(self._area, self._manifest.label)
        if file is None:
            raise ChunkMissingError(f"{self._manifest.label} was fetched and given up at once: it is no longer wanted")
        return file

    async def _fill(self, filling: Filling, sources: Sequence[CheckpointClient], peers: Sequence[str]) -> None:
        """Threads share one iterator, so as many chunks are under way as there are threads. The first failure ends all."""
        memory = await in_thread(self._memory, filling)
        self._holdings.begin(self._manifest, filling.descriptor)
        token = sources[0].token if sources else None
        urls = await asyncio.gather(*(source.data_url() for source in sources))
        holders = [(url, token, _PEER_TIMEOUT_S) for url in peers]
        holders += [(url, source.token, source.timeout_s) for url, source in zip(urls, sources, strict=True)]
        base, known = await in_thread(self._open_base)
        threads = [
            _Thread(self, filling, memory, base, known, [ChunkReader(*holder) for holder in holders])
            for _ in range(self._concurrency)
        ]
        queue = _Queue(self._manifest.sizes())
        # Threads of their own: they wait for others, and must not keep this process's from its work.
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="fetch")
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
            if base is not None:
                base.close()

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

    def places(self, digest: str) -> list[int]:
        """Every offset at which a chunk stands."""
        return self._places[digest]

    def brought(self, digest: str) -> None:
        """It is in its places, verified: others may have it from here."""
        self._holdings.add(digest)


class _Queue:
    """Chunks still to be brought, for several threads; `end` leaves none. In no order: hosts that fetch at the same time then
    have different ones to give to each other."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._chunks = iter(random.sample(list(sizes.items()), len(sizes)))
        self._lock = threading.Lock()
        self._ended = False

    def next(self) -> tuple[str, int] | None:
        with self._lock:
            return None if self._ended else next(self._chunks, None)

    def end(self) -> None:
        self._ended = True


class _Thread:
    """One of those that fill a version; each has connections of its own."""

    def __init__(
        self,
        fetch: Fetch,
        filling: Filling,
        memory: memoryview,
        base: HeldFile | None,
        known: Mapping[str, tuple[int, int]],
        readers: Sequence[ChunkReader],
    ) -> None:
        self.fetched = self.reused = self.altered = 0
        self._fetch = fetch
        self._filling = filling
        self._memory = memory
        self._base = base
        self._known = known
        self._readers = list(readers)
        self._all = tuple(readers)

    def run(self, queue: _Queue) -> None:
        try:
            while (chunk := queue.next()) is not None:
                self._bring(*chunk)
                self._fetch.brought(chunk[0])
        except BaseException:
            queue.end()
            raise

    def close(self) -> None:
        for reader in self._all:
            reader.close()

    def _bring(self, digest: str, size: int) -> None:
        first, *others = self._fetch.places(digest)
        if self._copied(digest, [first, *others]):
            self.reused += size
            return
        self._read(digest, self._memory[first : first + size])
        self.fetched += size
        for offset in others:
            self._filling.write(self._memory[first : first + size], offset)

    def _copied(self, digest: str, offsets: Sequence[int]) -> bool:
        """From the version before, if it has the chunk undamaged."""
        if self._base is None or digest not in self._known:
            return False
        data = self._base.slice(*self._known[digest])
        try:
            verify(data, digest, "the version before")
        except ChunkAlteredError as error:
            _log.warning("%s; it is fetched again", error)
            return False
        for offset in offsets:
            self._filling.write(data, offset)
        return True

    def _read(self, digest: str, target: memoryview) -> None:
        """From the first source that has it unaltered; one that did not answer is asked for nothing more, unless it is the only
        one. Raises what the last one failed with."""
        last: Exception = ChunkMissingError(f"chunk {digest} has no source; name at least one checkpoint service")
        for reader in tuple(self._readers):
            try:
                reader.read_into(digest, target)
            except ChunkAlteredError as error:
                self.altered += 1
                last = error
            except ChunkMissingError as error:
                last = error
                continue  # another receiver that has not got it yet
            except ServiceRefusedError as error:
                last = error
            except ServiceUnreachableError as error:
                last = error
                if len(self._readers) > 1:
                    self._readers.remove(reader)
            else:
                return
            _log.warning("chunk %s is not taken from %s: %s", digest, reader.url, last)
        raise last


def _places(manifest: Manifest, layout: Layout) -> dict[str, list[int]]:
    """Every offset at which a chunk stands."""
    places: dict[str, list[int]] = {}
    for tensor in manifest.tensors:
        start = layout.offsets[tensor.name]
        for chunk in tensor.chunks:
            places.setdefault(chunk.digest, []).append(start)
            start += chunk.size
    return places
