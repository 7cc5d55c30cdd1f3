"""Brings a version to a host that has it not: chunk by chunk from whoever holds it, into the host's area.

Chunks that the version before it had are copied on the host, all others are fetched, all are verified. One receiver of a
host fetches; what it brought is everybody's there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ManifestError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import Form, Layout, lay_out
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.service_client import CheckpointClient

_log = logging.getLogger(__name__)

_FILLING: Final = "fetch-"


class Fetch:
    """One version on its way. `fetched` and `reused` are bytes, by where they came from."""

    def __init__(self, area: SharedArea, manifest: Manifest, base: Manifest | None, concurrency: int) -> None:
        self.fetched = 0
        self.reused = 0
        self.altered = 0
        self._area = area
        self._manifest = manifest
        self._base = base
        self._concurrency = concurrency
        self._layout = lay_out({one.name: Form(one.dtype, one.shape) for one in manifest.tensors}, manifest.label)
        self._places = _places(manifest, self._layout)

    async def run(self, sources: Sequence[CheckpointClient]) -> HeldFile:
        """The version, held by the area. Raises what the last source of a chunk failed with, or NoRoomError."""
        name = f"{_FILLING}{self._manifest.label}"
        await in_thread(self._area.clear_abandoned, _FILLING)
        filling = await in_thread(self._area.begin, name)
        try:
            await in_thread(filling.write, self._layout.header, 0)
            await self._fill(filling, sources)
            await in_thread(filling.finish, self._layout.size_bytes)
            file = await in_thread(self._hold, name)
        except BaseException:
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

    async def _fill(self, filling: Filling, sources: Sequence[CheckpointClient]) -> None:
        """Workers share one iterator, so `concurrency` chunks are under way. The first failure ends all."""
        queue = iter(self._manifest.sizes().items())
        base, known = await in_thread(self._open_base)

        async def work() -> None:
            for digest, size in queue:
                if digest in known and base is not None and await in_thread(self._copy, filling, base, digest, known):
                    self.reused += size
                else:
                    data = await self._get(digest, size, sources)
                    await in_thread(self._put, filling, digest, data)
                    self.fetched += size

        workers = [asyncio.create_task(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if base is not None:
                base.close()

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

    def _copy(self, filling: Filling, base: HeldFile, digest: str, known: dict[str, tuple[int, int]]) -> bool:
        data = base.slice(*known[digest])
        try:
            verify(data, digest, f"{self._area.folder}, version before {self._manifest.label}")
        except ChunkAlteredError as error:
            _log.warning("%s; it is fetched again", error)
            return False
        self._put(filling, digest, data)
        return True

    def _put(self, filling: Filling, digest: str, data: bytes | memoryview) -> None:
        for offset in self._places[digest]:
            filling.write(data, offset)

    async def _get(self, digest: str, size: int, sources: Sequence[CheckpointClient]) -> bytes:
        """From the first source that has it unaltered. Raises what the last one failed with."""
        last: Exception = ChunkMissingError(f"chunk {digest} has no source; name at least one checkpoint service")
        for source in sources:
            try:
                return await source.get_chunk(digest, size)
            except ChunkAlteredError as error:
                self.altered += 1
                last = error
            except (ChunkMissingError, ServiceUnreachableError, ServiceRefusedError) as error:
                last = error
            _log.warning("chunk %s is not taken from %s: %s", digest, source.url, last)
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
