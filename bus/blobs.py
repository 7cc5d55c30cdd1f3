"""Bytes above the inline limit travel by reference: (digest, size) in the message, the bytes here.

    <folder>/STORE               which store this is: its id
    <folder>/<2 hex>/<digest>    a blob, by the xxh3-128 of its bytes
    <folder>/<2 hex>/.aside-*    one that is being written
    <folder>/.swept/<digest>     one that is being removed (blob_removal.py)

Invariant: a blob is durable (fsynced, renamed into place) before the message that refers to it is published, and it is
verified whenever it is read. Storing it again makes it young again, which takes it out of the hands of a sweep.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from physarum.bus.errors import BlobAlteredError, BlobMissingError, RecordError

ASIDE_PREFIX: Final = ".aside-"
SWEPT: Final = ".swept"
_IDENTITY: Final = "STORE"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class BlobRef(msgspec.Struct, frozen=True):
    """A reference to bytes in a blob store. `digest` is xxh3-128, hex; `size` is in bytes."""

    digest: str
    size: int

    def __post_init__(self) -> None:
        checked(self.digest)

    @classmethod
    def of(cls, data: bytes) -> BlobRef:
        """The reference to `data`; large data release the GIL."""
        return cls(digest(data), len(data))


def digest(data: bytes) -> str:
    """xxh3-128 as hex: integrity inside a run, not protection against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)


def is_digest(text: str) -> bool:
    """Only such text may become a file name."""
    return _DIGEST.fullmatch(text) is not None


def checked(ref_digest: str) -> str:
    """A digest becomes a path, and it may come from the wire: nothing but a digest passes. Raises RecordError."""
    if not is_digest(ref_digest):
        raise RecordError(f"blob digest {ref_digest!r} is not 32 lower-case hex digits (xxh3-128)")
    return ref_digest


class BlobStore:
    """Content-addressed files under one folder that the actors of one machine share. All methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> BlobRef:
        """Stores bytes durably, or confirms them where they are. Raises OSError when the disk is full."""
        ref = BlobRef.of(data)
        if not self.confirm(ref.digest):
            with Incoming(self, ref.digest) as incoming:
                incoming.write(data)
                incoming.commit()
        return ref

    def confirm(self, ref_digest: str) -> bool:
        """Makes a blob young again and durable; False when it is absent or altered: it must be stored (again)."""
        path = self.path(ref_digest)
        now_ns = time.time_ns()
        try:
            # Before it is read: a sweep that has taken it sees that somebody wants it, or this fails.
            os.utime(path, ns=(now_ns, now_ns))
            whole = digest(path.read_bytes()) == ref_digest
        except (FileNotFoundError, NotADirectoryError):
            return False
        if whole:
            fsync_folder(path.parent)  # another writer may have renamed it a moment ago
        return whole

    def get(self, ref: BlobRef) -> bytes:
        """The bytes; raises BlobMissingError or BlobAlteredError."""
        data = self._read(ref.digest)
        if data is None:
            raise BlobMissingError(
                f"blob {ref.digest} ({ref.size} bytes) is not in {self.folder}; the message that refers to it cannot be read"
            )
        found = digest(data)
        if found != ref.digest:
            raise BlobAlteredError(
                f"blob {ref.digest} in {self.folder} has digest {found}: its bytes were altered; restore or remove it"
            )
        return data

    def find(self, ref_digest: str) -> Path | None:
        """Where the bytes are now, unverified; None when they are not here."""
        return next((place for place in self._places(ref_digest) if place.is_file()), None)

    def delete(self, ref_digest: str) -> None:
        """Removes a blob; one that is not there is no error. Raises RecordError for what is not a digest."""
        self.path(ref_digest).unlink(missing_ok=True)

    def path(self, ref_digest: str) -> Path:
        """Raises RecordError for what is not a digest."""
        return self.folder / checked(ref_digest)[:2] / ref_digest

    def known_identity(self) -> str | None:
        """The id of this store; None when nobody gave it one: no service and no supervisor made this folder."""
        try:
            return (self.folder / _IDENTITY).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def identity(self) -> str:
        """The id of this store, given now if it has none. Two processes at once agree on one."""
        known = self.known_identity()
        if known is not None:
            return known
        self.folder.mkdir(parents=True, exist_ok=True)
        made = uuid.uuid4().hex
        aside = self.folder / f"{ASIDE_PREFIX}{made}"
        with aside.open("w") as file:
            file.write(made)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(aside, self.folder / _IDENTITY)
        aside.unlink()
        fsync_folder(self.folder)
        return (self.folder / _IDENTITY).read_text()

    def _read(self, ref_digest: str) -> bytes | None:
        for place in self._places(ref_digest):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return place.read_bytes()
        return None

    def _places(self, ref_digest: str) -> Iterator[Path]:
        """A sweep takes a blob aside before it removes it, and puts it back when it is wanted: in either order."""
        path = self.path(ref_digest)
        yield from (path, self.folder / SWEPT / ref_digest, path)


class Incoming:
    """Bytes on their way into a store: nothing of them is seen before `commit`, and nothing is left without it."""

    def __init__(self, store: BlobStore, ref_digest: str) -> None:
        self._target = store.path(ref_digest)
        self._hash = xxhash.xxh3_128()
        parent = self._target.parent
        if not parent.is_dir():
            parent.mkdir(parents=True, exist_ok=True)
            fsync_folder(store.folder)
        handle, aside = tempfile.mkstemp(dir=parent, prefix=ASIDE_PREFIX)
        self._file, self._aside = os.fdopen(handle, "wb"), Path(aside)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves nothing of what was not committed."""
        with contextlib.suppress(OSError):  # closing may try once more to write what the disk refused
            self._file.close()
        self._aside.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Raises OSError when the disk is full."""
        self._hash.update(data)
        self._file.write(data)

    def commit(self) -> None:
        """Gives the bytes their name, durably. Raises BlobAlteredError when they are not those of the digest."""
        found = self._hash.hexdigest()
        if found != self._target.name:
            raise BlobAlteredError(
                f"the bytes received as blob {self._target.name} have digest {found}: they were altered or cut on the way;"
                " send them again"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._aside, self._target)
        fsync_folder(self._target.parent)


def fsync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
