"""The threads that fill a version's file: each takes a chunk, copies it from the version before or reads it from a holder.

Blocking; they share nothing but the queue, and places that no two of them write.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from physarum.weightsync.area import Filling
from physarum.weightsync.chunk_reader import ChunkReader
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.held_file import HeldFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FillWork:
    """What is filled: `memory` is all of `filling`, `places` the offsets of each chunk there, `known` those in `base`, the
    version before; `brought` hears of each chunk that is in its places, verified."""

    filling: Filling
    memory: memoryview
    places: Mapping[str, Sequence[int]]
    base: HeldFile | None
    known: Mapping[str, tuple[int, int]]
    brought: Callable[[str], None]


class ChunkQueue:
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


class ChunkThread:
    """One of those that fill a version; each has connections of its own."""

    def __init__(self, work: FillWork, readers: Sequence[ChunkReader]) -> None:
        self.fetched = self.reused = self.altered = 0
        self._work = work
        self._readers = list(readers)
        self._all = tuple(readers)

    def run(self, queue: ChunkQueue) -> None:
        try:
            while (chunk := queue.next()) is not None:
                self._bring(*chunk)
                self._work.brought(chunk[0])
        except BaseException:
            queue.end()
            raise

    def close(self) -> None:
        for reader in self._all:
            reader.close()

    def _bring(self, digest: str, size: int) -> None:
        first, *others = self._work.places[digest]
        if self._copied(digest, [first, *others]):
            self.reused += size
            return
        self._read(digest, self._work.memory[first : first + size])
        self.fetched += size
        for offset in others:
            self._work.filling.write(self._work.memory[first : first + size], offset)

    def _copied(self, digest: str, offsets: Sequence[int]) -> bool:
        """From the version before, if it has the chunk undamaged."""
        base, known = self._work.base, self._work.known
        if base is None or digest not in known:
            return False
        data = base.slice(*known[digest])
        try:
            verify(data, digest, "the version before")
        except ChunkAlteredError as error:
            _log.warning("%s; it is fetched again", error)
            return False
        for offset in offsets:
            self._work.filling.write(data, offset)
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
