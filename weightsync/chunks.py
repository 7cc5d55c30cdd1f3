"""Content-addressed chunks on disk.

Invariant: a file under a digest's name holds the bytes of that digest, or is not there. Bytes are verified before they
get the name, written aside and renamed; `read` verifies them again. One process owns the folder. All methods block:
call them from a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from physarum.weightsync.digest import Bytes, is_digest, verify
from physarum.weightsync.durable import remove_asides, write_whole
from physarum.weightsync.errors import ChunkAlteredError, ChunkMissingError


class ChunkStore:
    """The chunks in `folder`. `fsync` makes each one survive a power failure before `put` returns. Who does not own the folder
    may `only_look`."""

    def __init__(self, folder: Path, fsync: bool = False, only_look: bool = False) -> None:
        self.folder = folder
        self._fsync = fsync
        for prefix in () if only_look else range(256):
            (folder / f"{prefix:02x}").mkdir(parents=True, exist_ok=True)
            remove_asides(folder / f"{prefix:02x}")

    def path(self, digest: str) -> Path:
        """Where the chunk is, or would be. Raises ChunkMissingError when `digest` is no digest (and no file name)."""
        if not is_digest(digest):
            raise ChunkMissingError(f"{digest!r} is no digest; expected 32 hex digits, or b3- and 64")
        return self.folder / digest[-2:] / digest

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def size(self, digest: str) -> int | None:
        """Bytes of the chunk; None when it is not here."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those that are not here. Those that are become young again, so that no sweep takes them from a publisher
        which was just told that it need not send them."""
        absent: list[str] = []
        for digest in dict.fromkeys(digests):
            try:
                os.utime(self.path(digest))
            except FileNotFoundError:
                absent.append(digest)
        return absent

    def put(self, digest: str, data: Bytes) -> bool:
        """Stores `data` under `digest`; False when it was here already. Raises ChunkAlteredError."""
        verify(data, digest, "chunk to be stored")
        file = self.path(digest)
        if file.is_file():
            os.utime(file)
            return False
        write_whole(file, [data], self._fsync)
        return True

    def read(self, digest: str) -> bytes:
        """The verified bytes. Raises ChunkMissingError, ChunkAlteredError (the file is then gone: send it anew)."""
        file = self.path(digest)
        try:
            data = file.read_bytes()
        except FileNotFoundError as error:
            raise ChunkMissingError(f"chunk {digest} is not in {self.folder}") from error
        try:
            verify(data, digest, str(file))
        except ChunkAlteredError:
            file.unlink(missing_ok=True)
            raise
        return data

    def delete(self, digest: str) -> None:
        self.path(digest).unlink(missing_ok=True)

    def sweep(self, live: Collection[str], grace_s: float) -> int:
        """Deletes what is not `live` and was neither stored nor asked for within `grace_s`; returns the bytes freed."""
        keep = frozenset(live)
        limit = time.time() - grace_s
        freed = 0
        for file in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            state = file.stat()
            if file.name not in keep and is_digest(file.name) and state.st_mtime <= limit:
                file.unlink(missing_ok=True)
                freed += state.st_size
        return freed
