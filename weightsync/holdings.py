"""What a receiver has brought to its host, for other receivers: each chunk from the moment it was verified.

So hosts that fetch the same version at the same time get most of it from each other, and the service sends it about once.
Invariant: a chunk is offered only after its bytes were verified in the file, and the file is not overwritten while it is
offered (it keeps the lock of whoever filled it).
"""

from __future__ import annotations

import os
from typing import Final

from physarum.weightsync.chunk_reader import Difference
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest

_KEPT_BYTES: Final = 256 << 20
"""Of differences, for each version."""


class _Holding:
    """One version, complete or on its way."""

    def __init__(self, manifest: Manifest, file: HeldFile) -> None:
        self.label = manifest.label
        self.manifest = manifest
        self.file = file
        self.places = file.places(manifest)
        self.there: set[str] = set()
        self.differences: dict[tuple[str, str, int], bytes] = {}
        self.differing_bytes = 0


class Holdings:
    """The newest version of one receiver. Filled by its threads, read by the event loop that serves (chunk_route.py)."""

    store = None
    """Nothing is in a store here."""

    def __init__(self) -> None:
        self._newest: _Holding | None = None

    @property
    def label(self) -> str | None:
        """Of the version that is offered."""
        return self._newest.label if self._newest is not None else None

    def begin(self, manifest: Manifest, descriptor: int) -> None:
        """`descriptor` is of a file with its header written and its whole size; the version before is offered no more."""
        self.close()
        own = os.dup(descriptor)
        os.lseek(own, 0, os.SEEK_SET)
        self._newest = _Holding(manifest, HeldFile(own))

    def add(self, digest: str, came_as: Difference | None = None) -> None:
        """The chunk is in its place, verified; `came_as` is passed on to whoever has the same base."""
        newest = self._newest
        if newest is None:
            return
        newest.there.add(digest)
        if came_as is not None and newest.differing_bytes + len(came_as.data) <= _KEPT_BYTES:
            newest.differing_bytes += len(came_as.data)
            newest.differences[digest, came_as.base, came_as.width] = came_as.data

    def difference(self, digest: str, base: str, width: int) -> bytes | None:
        """As it came: nothing is computed here."""
        newest = self._newest
        return newest.differences.get((digest, base, width)) if newest is not None else None

    def chunk(self, digest: str) -> tuple[HeldFile, int, int] | None:
        """(File, offset, bytes), to be read while the file is in use; None: not here, or not yet."""
        newest = self._newest
        if newest is None or digest not in newest.there:
            return None
        return newest.file, *newest.places[digest]

    def version(self, label: str) -> tuple[HeldFile, Manifest] | None:
        """The version once it is complete."""
        newest = self._newest
        complete = newest is not None and newest.label == label and newest.there.issuperset(newest.places)
        return (newest.file, newest.manifest) if newest is not None and complete else None

    def close(self) -> None:
        """Offers nothing."""
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.file.close()
