"""Bytes above the inline limit travel by reference: (digest, size) in the message, the bytes here.

A blob is durable (fsynced, renamed into place) before the message that refers to it is published, and it is verified
whenever it is read.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from physarum.bus.errors import BlobAlteredError, BlobMissingError, RecordError

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class BlobRef(msgspec.Struct, frozen=True):
    """A reference to bytes in a blob store. `digest` is xxh3-128, hex."""

    digest: str
    size: int

    def __post_init__(self) -> None:
        _checked(self.digest)


def digest(data: bytes) -> str:
    """xxh3-128 as hex: integrity inside a run, not protection against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)


class BlobStore:
    """Content-addressed files under one folder that the run's actors share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> BlobRef:
        """Stores bytes durably; storing the same bytes again costs nothing. Raises OSError when the disk is full."""
        ref = BlobRef(digest(data), len(data))
        target = self._path(ref.digest)
        if target.exists() and target.stat().st_size == ref.size:
            fsync_folder(target.parent)  # another writer may have renamed it a moment ago
            return ref
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            fsync_folder(self._folder)
        _write_durably(target, data)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The bytes; raises BlobMissingError or BlobAlteredError."""
        try:
            data = self._path(ref.digest).read_bytes()
        except FileNotFoundError as error:
            raise BlobMissingError(
                f"blob {ref.digest} ({ref.size} bytes) is not in {self._folder}; the message that refers to it cannot be read"
            ) from error
        found = digest(data)
        if found != ref.digest:
            raise BlobAlteredError(
                f"blob {ref.digest} in {self._folder} has digest {found}: its bytes were altered; restore or remove it"
            )
        return data

    def delete(self, ref_digest: str) -> None:
        """Removes a blob; one that is not there is no error. Raises RecordError for what is not a digest."""
        self._path(_checked(ref_digest)).unlink(missing_ok=True)

    def _path(self, ref_digest: str) -> Path:
        return self._folder / ref_digest[:2] / ref_digest


def _checked(ref_digest: str) -> str:
    """A digest becomes a path, and it may come from the wire: nothing but a digest passes."""
    if not _DIGEST.fullmatch(ref_digest):
        raise RecordError(f"blob digest {ref_digest!r} is not 32 lower-case hex digits (xxh3-128)")
    return ref_digest


def _write_durably(target: Path, data: bytes) -> None:
    """All or nothing: written aside, fsynced, renamed; a failure leaves no file behind."""
    handle, aside = tempfile.mkstemp(dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise
    fsync_folder(target.parent)


def fsync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
