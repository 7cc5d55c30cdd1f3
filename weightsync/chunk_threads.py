"""The threads that fill a version's file: each takes a chunk, copies it from the version before or reads it from a holder.

Blocking; they share nothing but the queue, and places that no two of them write.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from physarum.weightsync.area import Filling
from physarum.weightsync.chunk_reader import Base, Difference, Reader
from physarum.weightsync.digest import algorithm_of, digest_of, verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.pace import Pace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FillWork:
    """What is filled: `memory` is all of `filling`, `places` the offsets of each chunk there, `known` those in `base`, the
    version before; `before`: the chunk (digest, bytes of an element) that stood where each new one stands; `brought` hears of
    each chunk that is in its places, verified, and of what it came as."""

    filling: Filling
    memory: memoryview
    places: Mapping[str, Sequence[int]]
    base: HeldFile | None
    known: Mapping[str, tuple[int, int]]
    before: Mapping[str, tuple[str, int]]
    brought: Callable[[str, Difference | None], None]


class ChunkQueue:
    """Chunks still to be brought, for several threads; `end` leaves none. `shuffled`, in no order: hosts that fetch at the same
    time then have different ones to give to each other."""

    def __init__(self, sizes: Mapping[str, int], shuffled: bool = True) -> None:
        chunks = list(sizes.items())
        self._chunks = iter(random.sample(chunks, len(chunks)) if shuffled else chunks)
        self._lock = threading.Lock()
        self._ended = False

    def next(self) -> tuple[str, int] | None:
        with self._lock:
            return None if self._ended else next(self._chunks, None)

    def end(self) -> None:
        self._ended = True


class ChunkThread:
    """One of those that fill a version; each has connections of its own."""

    def __init__(self, work: FillWork, readers: Sequence[Reader], pace: Pace) -> None:
        self.fetched = self.reused = self.altered = 0
        self._work = work
        self._readers = list(readers)
        self._all = tuple(readers)
        self._pace = pace
        self._closed = False

    def run(self, queue: ChunkQueue) -> None:
        try:
            while (chunk := queue.next()) is not None:
                self._work.brought(chunk[0], self._bring(*chunk))
        except BaseException:
            queue.end()
            raise

    def close(self) -> None:
        """Ends what is under way, from any thread; nothing is asked for again."""
        self._closed = True
        for reader in self._all:
            reader.close()

    def _bring(self, digest: str, size: int) -> Difference | None:
        """What the chunk came as, if from elsewhere and as a difference."""
        first, *others = self._work.places[digest]
        if self._copied(digest, [first, *others]):
            self.reused += size
            return None
        came_as = self._read(digest, self._work.memory[first : first + size])
        self.fetched += size if came_as is None else len(came_as.data)
        for offset in others:
            self._work.filling.write(self._work.memory[first : first + size], offset)
        return came_as

    def _copied(self, digest: str, offsets: Sequence[int]) -> bool:
        """From the version before, if it has the chunk undamaged."""
        if digest in self._work.known and all(self._is_there(digest, offset) for offset in offsets):
            return True
        data = self._old(digest)
        if data is None:
            return False
        for offset in offsets:
            self._work.filling.write(data, offset)
        return True

    def _is_there(self, digest: str, offset: int) -> bool:
        """Whether the memory that is filled still has the chunk, of the version it held: to hash it is less than to copy it."""
        size = self._work.known[digest][1]
        if offset + size > self._work.filling.old_bytes:
            return False
        return digest_of(self._work.memory[offset : offset + size], algorithm_of(digest)) == digest

    def _old(self, digest: str) -> memoryview | None:
        """A chunk of the version before, verified; None: it is not there, or damaged."""
        base, known = self._work.base, self._work.known
        if base is None or digest not in known:
            return None
        data = base.slice(*known[digest])
        try:
            verify(data, digest, "the version before")
        except ChunkAlteredError as error:
            _log.warning("%s; it is fetched again", error)
            return None
        return data

    def _base_of(self, digest: str) -> Base | None:
        """What the chunk may come as a difference to."""
        before = self._work.before.get(digest)
        data = self._old(before[0]) if before is not None else None
        return Base(before[0], data, before[1]) if before is not None and data is not None else None

    def _read(self, digest: str, target: memoryview) -> Difference | None:
        """As a difference where that is quicker, and as a whole where that fails."""
        base = self._base_of(digest) if digest in self._work.before and self._pace.chosen() else None
        try:
            return self._read_timed(digest, target, base)
        except (ChunkAlteredError, ServiceRefusedError, ServiceUnreachableError):
            if base is None or self._closed:
                raise
            self._pace.failed_as_difference()
        return self._read_timed(digest, target, None)

    def _read_timed(self, digest: str, target: memoryview, base: Base | None) -> Difference | None:
        started = time.perf_counter()
        came_as = self._read_from_any(digest, target, base)
        if digest in self._work.before:
            self._pace.took(base is not None, (time.perf_counter() - started) / target.nbytes)
        return came_as

    def _read_from_any(self, digest: str, target: memoryview, base: Base | None) -> Difference | None:
        """From the first source that has it unaltered; one that did not answer is asked for nothing more, unless it is the only
        one. Raises what the last one failed with."""
        last: Exception = ChunkMissingError(f"chunk {digest} has no source; name at least one checkpoint service")
        for reader in tuple(self._readers):
            try:
                return reader.read_into(digest, target, base)
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
            _log.warning("chunk %s is not taken from %s: %s", digest, reader.url, last)
        raise last
