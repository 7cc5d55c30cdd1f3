"""One run's folder in an object store, by way of fsspec. Blocking; raises what the store's client raises.

    <url>/<name>-<digest>/<file>             as on disk
    <url>/<name>-<digest>/digests.msgpack    written last, removed first

Invariant: where a listing can be read and has the checkpoint's digest, every file that it names was taken whole before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import Callback  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import Named
from physarum.actors.trainer.digests import DIGESTS, digest_of, read_digests
from physarum.bus.errors import CodecError
from physarum.weightsync.errors import BucketUnfitError
from physarum.weightsync.mirror import bucket

BLOCK_BYTES: Final = 64 << 20
"""Read at a time: a request each."""

Moved = Callable[[], None]
"""Called whenever the store has taken or given something."""


def client(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises MirrorUnfitError where its implementation is not installed."""
    try:
        return bucket.client(url)
    except BucketUnfitError as error:
        raise MirrorUnfitError(f"checkpoint.mirror {error}") from error


class _Told(Callback):  # type: ignore[misc]  # fsspec is not typed
    """Passes on that something moved."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()
        self._moved = moved

    def call(self, hook_name: str | None = None, **values: object) -> None:
        """Called by the store's client at every part."""
        self._moved()


class Store:
    """What is under one URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._root = client(url)

    def keys(self) -> set[str]:
        """What is there, whole or not."""
        self._system.invalidate_cache()
        try:
            return {path.rstrip("/").rpartition("/")[2] for path in self._system.ls(self._root, detail=False)}
        except FileNotFoundError:
            return set()

    def listing(self, checkpoint: Named) -> bytes | None:
        """Its digest file; None unless it is there as the ledger says: then nothing of it counts."""
        try:
            found: bytes = self._system.cat_file(self._path(checkpoint, DIGESTS))
            same = digest_of(read_digests(found)) == checkpoint.digest
        except (FileNotFoundError, CodecError):
            return None
        return found if same else None

    def write(self, checkpoint: Named, source: Path, moved: Moved) -> int:
        """Sends a file, as the store's client does it best; returns its size. Raises MirrorError when the store has another."""
        path, size = self._path(checkpoint, source.name), source.stat().st_size
        if isinstance(self._system, LocalFileSystem):  # its own copy says nothing until it is done
            AbstractFileSystem.put_file(self._system, str(source), path, callback=_Told(moved))
        else:
            self._system.put_file(str(source), path, callback=_Told(moved))
        found = self._system.info(path)["size"]
        if found != size:
            raise MirrorError(f"{self.name(checkpoint)}/{source.name} has {found} bytes; {size} were sent")
        return size

    def conclude(self, checkpoint: Named, listing: bytes) -> None:
        """Makes it count. Raises MirrorError when the store answers otherwise."""
        self._system.pipe_file(self._path(checkpoint, DIGESTS), listing)
        if self.listing(checkpoint) is None:
            raise MirrorError(f"{self.name(checkpoint)}: the store took {DIGESTS} and gives back something else")

    def read(self, checkpoint: Named, file: str) -> Iterator[bytes]:
        """Raises FileNotFoundError."""
        with self._system.open(self._path(checkpoint, file), "rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                yield block

    def remove(self, checkpoint: Named) -> None:
        """At no moment does a part of it count."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(checkpoint, DIGESTS))
        with contextlib.suppress(FileNotFoundError):  # an object store's folder ends with its last object
            self._system.rm(f"{self._root}/{checkpoint.key}", recursive=True)

    def name(self, checkpoint: Named) -> str:
        """For messages."""
        return f"{self._url}/{checkpoint.key}"

    def _path(self, checkpoint: Named, file: str) -> str:
        return f"{self._root}/{checkpoint.key}/{file}"
