"""A version out of an object store: one more holder of its chunks, asked last. Blocking.

An object is read whole and verified by its blake3; what is taken out of it is verified by the manifest like any other chunk.
Objects that hold many small chunks are kept for the others, a few at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from physarum.bus.version import Version
from physarum.weightsync.chunk_reader import Base, Difference
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    BucketError,
    BucketUnfitError,
    ChunkAlteredError,
    ChunkMissingError,
    ServiceUnreachableError,
)
from physarum.weightsync.manifest import Manifest, content_digest
from physarum.weightsync.mirror.bucket import Objects
from physarum.weightsync.mirror.record import Attached, Record, Stored, newest_record, read_record, versions_in

_KEPT: Final = 16
"""Packs, of up to 8 MiB each (packing.py)."""


class Mirror:
    """The versions in `objects`; `key` opens their seals. From any thread."""

    def __init__(self, objects: Objects, key: str | None) -> None:
        self.objects = objects
        self._key = key

    @property
    def url(self) -> str:
        return self.objects.url

    def latest(self) -> Version | None:
        """The newest version by name: one listing, nothing is read. Raises BucketError."""
        return max(versions_in(self.objects), default=None)

    def has(self, version: Version) -> bool:
        """By name, as `latest`. Raises BucketError."""
        return version in versions_in(self.objects)

    def newest(self) -> Record | None:
        """Raises BucketError, BucketUnfitError."""
        return newest_record(self.objects, self._key)

    def record(self, version: Version) -> Record:
        """Raises ObjectAbsentError where it is not there, BucketError, BucketUnfitError."""
        return read_record(self.objects, version, self._key)

    def holder(self, manifest: Manifest) -> MirrorHolder:
        """Of the chunks of one version, for one fetch."""
        return MirrorHolder(self, manifest)


class MirrorHolder:
    """One version there. Its record is read once, when the first chunk is asked for."""

    def __init__(self, mirror: Mirror, manifest: Manifest, record: Record | None = None) -> None:
        self.url = mirror.url
        self._mirror = mirror
        self._manifest = manifest
        self._record = record
        self._places: dict[str, tuple[Stored, int, int]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def chunk(self, digest: str) -> memoryview:
        """Its bytes, as the object has them whose digest was verified. Raises ChunkMissingError, ChunkAlteredError,
        ServiceUnreachableError."""
        try:
            stored, offset, size = self._place(digest)
            return memoryview(self._object(stored))[offset : offset + size]
        except BucketUnfitError as error:
            raise ChunkMissingError(f"chunk {digest}: {error}") from error
        except BucketError as error:
            raise ServiceUnreachableError(f"chunk {digest}: {error}") from error

    def reader(self) -> MirrorReader:
        """For one thread."""
        return MirrorReader(self)

    def _place(self, digest: str) -> tuple[Stored, int, int]:
        with self._guard:
            if not self._places:
                record = self._record or self._mirror.record(self._manifest.version)
                if content_digest(record.manifest) != content_digest(self._manifest):
                    raise BucketUnfitError(f"{self.url} has {self._manifest.label} with other content: of another run")
                self._places = _places(record)
        return self._places[digest]

    def _object(self, stored: Stored) -> bytes:
        """Read once for all threads that want something of it."""
        if len(stored.chunks) == 1:
            return self._read(stored)
        with self._guard:
            lock = self._locks.setdefault(stored.digest, threading.Lock())
        with lock:
            with self._guard:
                data = self._kept.get(stored.digest)
            if data is None:
                data = self._read(stored)
            with self._guard:
                self._kept[stored.digest] = data
                self._kept.move_to_end(stored.digest)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return data

    def _read(self, stored: Stored) -> bytes:
        return read_object(self._mirror.objects, stored)


class MirrorReader:
    """As ChunkReader, for one thread; the deadline is the bucket's."""

    def __init__(self, holder: MirrorHolder) -> None:
        self.url = holder.url
        self._holder = holder

    def read_into(self, digest: str, target: memoryview, base: Base | None = None) -> Difference | None:
        """Fills `target` with the chunk's verified bytes. Raises ChunkMissingError, ChunkAlteredError,
        ServiceUnreachableError."""
        data = self._holder.chunk(digest)
        if data.nbytes != target.nbytes:
            raise ChunkAlteredError(f"chunk {digest} from {self.url} is {data.nbytes} bytes, expected {target.nbytes}")
        target[:] = data
        verify(target, digest, f"chunk from {self.url}")
        return None

    def close(self) -> None:
        """What is under way ends by its deadline."""


def read_object(objects: Objects, named: Stored | Attached) -> bytes:
    """Its bytes, verified. Raises ChunkAlteredError, ObjectAbsentError, BucketError."""
    data = objects.get(named.key)
    try:
        verify(data, named.digest, f"{objects.url}/{named.key}")
    except ChunkAlteredError as error:
        raise ChunkAlteredError(f"{error}; remove it there: the next version that needs it sends it again") from error
    return data


def _places(record: Record) -> dict[str, tuple[Stored, int, int]]:
    """The object of each chunk, where in it, and its bytes."""
    sizes = record.manifest.sizes()
    found: dict[str, tuple[Stored, int, int]] = {}
    for stored in record.objects:
        start = 0
        for digest in stored.chunks:
            found[digest] = (stored, start, sizes[digest])
            start += sizes[digest]
    return found
