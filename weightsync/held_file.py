"""One version as a complete file: its tensors and chunks as views of memory, without a copy.

Invariant: while a HeldFile is open or in use nobody overwrites its bytes (area.py). They are not verified: whoever hands
them on to an engine or an own copy verifies them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import ChunkAlteredError, ManifestError
from physarum.weightsync.layout import Form, read_layout
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.mappings import memory_of


class HeldFile:
    """An open safetensors file. `descriptor` becomes its own."""

    def __init__(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as file:
            self.forms, self._offsets = read_layout(file)
            self._memory = memory_of(descriptor)
            self._locked: int | None = os.dup(descriptor)  # the lock belongs to the open file, not to its number
        self._guard = threading.Lock()
        self._users = 1

    @classmethod
    def open(cls, area: SharedArea, label: str) -> HeldFile | None:
        """None when the area has no such version. Raises ChunkAlteredError for a file that is damaged."""
        descriptor = area.open(label)
        if descriptor is None:
            return None
        try:
            return cls(descriptor)
        except ManifestError as error:
            raise ChunkAlteredError(f"{area.path(label)} is damaged: {error}") from error

    def __enter__(self) -> HeldFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def link(self, path: Path) -> bool:
        """The very file that is open gets another name; False: it has none any more, so it cannot get one."""
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:  # with a folder's descriptor the call follows the link in /proc, to the file and not to a name
            os.link(f"/proc/self/fd/{self._locked}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        except FileNotFoundError:
            return False
        finally:
            os.close(folder)
        return True

    def close(self) -> None:
        """Views must not be read any more, but within `using`."""
        with self._guard:
            self._users -= 1
            if self._users <= 0 and self._locked is not None:
                os.close(self._locked)
                self._locked = None

    @contextlib.contextmanager
    def using(self) -> Iterator[bool]:
        """Views may be read until its end, whoever closes the file meanwhile; False: it is closed already."""
        with self._guard:
            is_open = self._locked is not None
            self._users += is_open
        try:
            yield is_open
        finally:
            if is_open:
                self.close()

    def tensor(self, name: str) -> memoryview:
        """The bytes of a tensor. Raises ManifestError."""
        form = self.forms.get(name)
        if form is None:
            raise ManifestError(f"the file holds no tensor {name}")
        return self.slice(self._offsets[name], form.size_bytes)

    def offset(self, name: str) -> int:
        """Where the bytes of a tensor stand in the file."""
        return self._offsets[name]

    @property
    def descriptor(self) -> int:
        """Of the open file; it stays this file's own."""
        if self._locked is None:
            raise ValueError("the file is closed")
        return self._locked

    def slice(self, offset: int, size: int) -> memoryview:
        """Bytes of the file (places)."""
        return memoryview(self._memory)[offset : offset + size]

    def chunks(self, tensor: TensorEntry) -> Iterator[tuple[str, memoryview]]:
        """(Digest that it should have, bytes) of each chunk of a manifest's tensor. Raises ManifestError."""
        self._check_form(tensor)
        start, data = 0, self.tensor(tensor.name)
        for chunk in tensor.chunks:
            yield chunk.digest, data[start : start + chunk.size]
            start += chunk.size

    def places(self, manifest: Manifest) -> dict[str, tuple[int, int]]:
        """(Offset, size) of every chunk of `manifest`, whose tensors this file must hold. Raises ManifestError."""
        places: dict[str, tuple[int, int]] = {}
        for tensor in manifest.tensors:
            self._check_form(tensor)
            start = self._offsets[tensor.name]
            for chunk in tensor.chunks:
                places.setdefault(chunk.digest, (start, chunk.size))
                start += chunk.size
        return places

    def _check_form(self, tensor: TensorEntry) -> None:
        if self.forms.get(tensor.name) != Form(tensor.dtype, tensor.shape):
            raise ManifestError(
                f"the file holds {tensor.name} as {self.forms.get(tensor.name)}, the manifest as {tensor.dtype} {tensor.shape}"
            )
