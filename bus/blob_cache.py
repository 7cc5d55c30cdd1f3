"""Blobs that were fetched or sent over HTTP, on the disk of whoever did: at most so many bytes, the unused ones go first.

One process owns the folder. A cache may lose anything at any time, so nothing is fsynced, and no error of its disk is one
of its owner's.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Final

from physarum.bus.blobs import BlobRef, digest

_log = logging.getLogger(__name__)

_KEPT: Final = 0.8
"""What is left after making room, so that not every blob has to make some."""


class BlobCache:
    """Files by digest in `folder`, together at most `limit_bytes`. All methods block; call them one at a time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._held_bytes: int | None = None  # not looked at yet: most actors have the run's folder and need no cache

    def get(self, ref: BlobRef) -> bytes | None:
        """The verified bytes; None when they are not here (any more)."""
        path = self._folder / ref.digest
        try:
            data = path.read_bytes()
            now_ns = time.time_ns()
            os.utime(path, ns=(now_ns, now_ns))
        except OSError:
            return None
        if digest(data) == ref.digest:
            return data
        _log.warning("%s was altered: it is removed from the cache and fetched again", path)
        path.unlink(missing_ok=True)
        self._held_bytes = None
        return None

    def put(self, ref: BlobRef, data: bytes) -> None:
        """Keeps `data` if there is or can be room."""
        path = self._folder / ref.digest
        if ref.size > self._limit_bytes or path.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = self._held() if self._held_bytes is None else self._held_bytes
            if held + ref.size > self._limit_bytes:
                held = self._make_room(ref.size)
            aside = self._folder / "writing"
            aside.write_bytes(data)
            os.replace(aside, path)
            self._held_bytes = held + ref.size
        except OSError as error:
            _log.warning("blob %s is not cached in %s: %s", ref.digest, self._folder, error)
            shutil.rmtree(self._folder, ignore_errors=True)  # gives the room back to those who need it
            self._held_bytes = None

    def _held(self) -> int:
        return sum(file.stat().st_size for file in self._folder.glob("*"))

    def _make_room(self, size: int) -> int:
        """The bytes that are left."""
        files = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in self._folder.glob("*"))
        left = sum(held for _, held, _ in files)
        goal = min(int(self._limit_bytes * _KEPT), self._limit_bytes - size)
        for _, held, file in files:
            if left <= goal:
                break
            file.unlink()
            left -= held
        return left
