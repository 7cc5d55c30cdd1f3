"""Copying a version to a bucket, and letting old ones go. Blocking.

    objects that the store lacks, side by side --> all there? --> the record --> older records --> objects that none names

Invariant: after any write or removal, and after none, every record that is there names only objects that are there, as long as
one process writes. One that comes later, as a trainer that lost its lease does, is refused where it is seen, and otherwise adds
an older version that nobody takes for the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from physarum.bus.version import Fork, Version, is_withdrawn
from physarum.weightsync.digest import digest_of, verify
from physarum.weightsync.errors import BucketUnfitError, ObjectAbsentError
from physarum.weightsync.manifest import Manifest, content_digest
from physarum.weightsync.mirror.bucket import ASIDE, Bucket
from physarum.weightsync.mirror.packing import pack
from physarum.weightsync.mirror.record import (
    OBJECTS,
    VERSIONS,
    Attached,
    Record,
    Stored,
    newest_record,
    object_key,
    read_record,
    record_key,
    seal,
    versions_in,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Read = Callable[[str], bytes | memoryview]
"""The bytes of a chunk by its digest; they are verified here. Raises ChunkMissingError where they are gone."""

_ANOTHER: Final = "another run of this name did; give each a run.name or a checkpoint.versions.mirror of its own"
THREADS: Final = 8
"""Requests under way at once: a store answers each after tens of milliseconds."""


class Copied(msgspec.Struct, frozen=True):
    """What was sent; nothing, where all was there. `record` was written."""

    objects: int
    size_bytes: int
    record: bool


class Copying:
    """The copies that one process makes into `bucket`; `moved` hears of everything that the store has taken or given.
    `key` seals records."""

    def __init__(self, bucket: Bucket, moved: Callable[[], None], key: str | None, threads: int = THREADS) -> None:
        self._bucket, self._moved, self._key, self._threads = bucket, moved, key, threads

    def copy(self, manifest: Manifest, read: Read, files: Mapping[str, Path], withdrawn: Sequence[Fork] = ()) -> Copied:
        """Sends what is not there. Raises BucketUnfitError (a newer version is there, or other content under this one),
        ChunkMissingError, ChunkAlteredError (the bytes here), BucketError."""
        before = self._before(manifest)
        there = self._there()
        known = {one.chunks: one for one in before.objects} if before is not None else {}
        packs = pack(manifest)
        placed = self._side_by_side(lambda chunks: self._place(chunks, manifest, read, known.get(chunks), there), packs)
        attached = self._side_by_side(lambda path: self._attach(path, there), files.values())
        record = Record(
            manifest=manifest,
            objects=tuple(one for one, _ in placed),
            files=tuple(one for one, _ in attached),
            withdrawn=tuple(withdrawn),
        )
        sent = [size for _, size in (*placed, *attached) if size]
        return Copied(len(sent), sum(sent), self._conclude(record))

    def retain(self, keep: int) -> list[str]:
        """Lets go of all but the newest `keep` versions that the newest one does not call withdrawn, and of what none of the
        others needs; labels that went. Raises BucketUnfitError for a record that cannot be read: then no object goes."""
        newest = newest_record(self._bucket, self._key)
        if newest is None:
            return []
        found = versions_in(self._bucket)
        holding = [one for one in found if not is_withdrawn(one, newest.withdrawn)]
        kept = {*holding[-keep:], newest.manifest.version}
        gone = [one for one in found if one not in kept]
        for version in gone:
            self._remove(record_key(version))
        left = {*found, *versions_in(self._bucket)} - {*gone}  # what one listing lacks the other may have
        self._sweep(read_record(self._bucket, one, self._key).live() for one in left)
        return [str(one) for one in gone]

    def _sweep(self, live: Iterable[set[str]]) -> None:
        left = {key for key in self._bucket.sizes(VERSIONS) if key.endswith(ASIDE)}  # by a process that was killed
        self._side_by_side(self._remove, left | (self._there().keys() - set().union(*live)))

    def _remove(self, key: str) -> None:
        self._bucket.remove(key)
        self._moved()

    def _before(self, manifest: Manifest) -> Record | None:
        """The newest version there, which may be this one."""
        newest = self._newest(manifest.version)
        record = self._record(newest) if newest is not None else None
        if record is None or record.manifest.version != manifest.version:
            return record
        if content_digest(record.manifest) != content_digest(manifest):
            raise BucketUnfitError(f"{self._bucket.url} has {manifest.label} with other content: {_ANOTHER}")
        return record

    def _newest(self, version: Version) -> Version | None:
        """Raises BucketUnfitError where it is newer than `version`."""
        found = versions_in(self._bucket)
        self._moved()
        if found and found[-1] > version:
            raise BucketUnfitError(
                f"{self._bucket.url} has {found[-1]}, newer than {version}: a later trainer wrote it, or {_ANOTHER}"
            )
        return found[-1] if found else None

    def _record(self, version: Version) -> Record | None:
        """One that cannot be read is written again, or goes when it is old."""
        try:
            return read_record(self._bucket, version, self._key)
        except BucketUnfitError as error:
            if not isinstance(error, ObjectAbsentError):
                _log.warning("%s; it is of no use", error)
            return None

    def _there(self) -> dict[str, int]:
        found = self._bucket.sizes(OBJECTS)
        self._moved()
        return found

    def _place(
        self, chunks: tuple[str, ...], manifest: Manifest, read: Read, known: Stored | None, there: Mapping[str, int]
    ) -> tuple[Stored, int]:
        """Where these chunks are, and how many bytes were sent for it. What an earlier record names is not even read."""
        if known is not None and there.get(known.key) == known.size:
            return known, 0
        data = b"".join(_verified(read, digest, manifest.label) for digest in chunks)
        self._moved()
        digest, sent = self._send(data, there)
        return Stored(digest, len(data), chunks), sent

    def _attach(self, path: Path, there: Mapping[str, int]) -> tuple[Attached, int]:
        data = path.read_bytes()
        digest, sent = self._send(data, there)
        return Attached(path.name, digest, len(data)), sent

    def _send(self, data: bytes, there: Mapping[str, int]) -> tuple[str, int]:
        digest = digest_of(data, "blake3")
        if there.get(object_key(digest)) == len(data):
            return digest, 0
        self._bucket.put(object_key(digest), data)
        self._moved()
        return digest, len(data)

    def _conclude(self, record: Record) -> bool:
        """Makes it count; False: it does already. Raises BucketUnfitError where the store answers otherwise."""
        lacking = record.live() - self._there().keys()
        if lacking:
            raise BucketUnfitError(
                f"{self._bucket.url} took {min(lacking)} and does not list it ({len(lacking)} objects of"
                f" {record.manifest.label}): somebody else removes objects there"
            )
        version = record.manifest.version
        self._newest(version)  # a later trainer may have come since the first object was sent
        if self._record(version) == record:
            return False
        self._bucket.put(record_key(version), seal(record, self._key))
        self._moved()
        if self._record(version) != record:
            raise BucketUnfitError(f"{self._bucket.url} took {record_key(version)} and gives back something else")
        return True

    def _side_by_side(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Raises what the first failing one raised; those that wait are not begun then."""
        if self._threads == 1:
            return [work(item) for item in items]
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="mirror")
        try:
            return list(pool.map(work, items))
        finally:
            pool.shutdown(cancel_futures=True)


def _verified(read: Read, digest: str, label: str) -> bytes | memoryview:
    """Nobody hashed what the trainer left in this host's memory: it is not given a name before."""
    data = read(digest)
    verify(data, digest, f"{label}, in this host's memory")
    return data
