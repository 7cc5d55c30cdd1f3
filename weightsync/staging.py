"""One complete safetensors folder per version, filled chunk by chunk, from what is held and from elsewhere.

Invariant: a folder under a version's label is complete and every byte of it was verified; one that is being filled is
named `.part-LABEL` and removed when it cannot be completed. One receiver owns the staging area. Methods block.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from physarum.weightsync.digest import algorithm_of, digest_of
from physarum.weightsync.errors import UpdateRefusedError
from physarum.weightsync.layout import FILE_NAME, Layout, lay_out
from physarum.weightsync.manifest import Manifest

_PART_PREFIX: Final = ".part-"
_SHARED_MEMORY: Final = Path("/dev/shm")


def default_staging(name: str) -> Path:
    """A staging area called `name` in shared memory where the host has it, else in the temporary folder."""
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    root = _SHARED_MEMORY if usable else Path(os.environ.get("TMPDIR", "/tmp"))
    return root / "physarum" / name


class Held:
    """A complete folder of an earlier version, as a source of chunks."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self._layout = layout

    def read(self, digest: str) -> bytes | None:
        """The verified bytes of a chunk; None when it is not here, or was altered meanwhile."""
        place = self._layout.places.get(digest)
        if place is None:
            return None
        size, offsets = place
        with (self.folder / FILE_NAME).open("rb") as file:
            data = os.pread(file.fileno(), size, offsets[0])
        return data if digest_of(data, algorithm_of(digest)) == digest else None


class Part:
    """A folder that is being filled. Chunks may be written in any order and from several threads.

    A thread cannot be cancelled: one that still writes when the part is discarded writes to a file without a name.
    """

    def __init__(self, area: Path, manifest: Manifest) -> None:
        self.layout = lay_out(manifest)
        self._whole = area / manifest.label
        self._folder = area / f"{_PART_PREFIX}{manifest.label}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._check_space(area)
        self._folder.mkdir(parents=True)
        self._closing = threading.Lock()
        self._descriptor: int | None = os.open(self._folder / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.ftruncate(self._descriptor, self.layout.size_bytes)
        _write_at(self._descriptor, self.layout.header, 0)

    def write(self, digest: str, data: bytes) -> None:
        """Puts a verified chunk at every place where the version has it. Raises UpdateRefusedError after `discard`."""
        with self._closing:
            if self._descriptor is None:
                raise UpdateRefusedError(f"staging of {self._whole.name} was given up")
            descriptor = os.dup(self._descriptor)
        try:
            for offset in self.layout.places[digest][1]:
                _write_at(descriptor, data, offset)
        finally:
            os.close(descriptor)

    def complete(self) -> Held:
        """Call it once every chunk was written."""
        self._close()
        shutil.rmtree(self._whole, ignore_errors=True)
        self._folder.rename(self._whole)
        return Held(self._whole, self.layout)

    def discard(self) -> None:
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        with self._closing:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _check_space(self, area: Path) -> None:
        area.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(area).free
        if free < self.layout.size_bytes:
            raise UpdateRefusedError(
                f"staging {self._whole.name} needs {self.layout.size_bytes} bytes, {area} has {free} free;"
                " enlarge it, or stage in another folder"
            )


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)


def remove_others(area: Path, keep: Callable[[Path], bool]) -> None:
    """Deletes every folder in `area` but those that `keep` wants, half-filled ones included."""
    if not area.is_dir():
        return
    for folder in area.iterdir():
        if not keep(folder):
            shutil.rmtree(folder, ignore_errors=True)
