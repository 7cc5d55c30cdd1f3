"""The folder from which one engine loads: a whole version by a second name, or only the tensors that changed.

Invariant: what is put there was verified before (`verify_tensors`), and nobody overwrites it while the folder exists. Blocking.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from physarum.weightsync.area import SharedArea
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import ChunkAlteredError, ManifestError, NoRoomError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import FILE_NAME, Form, lay_out
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import spread


def changed_tensors(manifest: Manifest, live: Manifest | None) -> list[TensorEntry]:
    """Those that differ from what is `live` (None: unknown, so all). Never none: an engine takes its label with a load."""
    if live is None:
        return list(manifest.tensors)
    before = {tensor.name: tensor for tensor in live.tensors}
    changed = [tensor for tensor in manifest.tensors if before.get(tensor.name) != tensor]
    return changed or [min(manifest.tensors, key=lambda tensor: tensor.size_bytes)]


def verify_tensors(file: HeldFile, manifest: Manifest, tensors: Sequence[TensorEntry]) -> None:
    """Hashes them in this host's memory. Raises ChunkAlteredError, naming what is not as the manifest says. Blocking."""
    try:
        chunks = [(tensor.name, digest, data) for tensor in tensors for digest, data in file.chunks(tensor)]
    except ManifestError as error:
        raise ChunkAlteredError(f"{manifest.label}: its file on this host is damaged: {error}") from error
    spread(lambda one: verify(one[2], one[1], f"{manifest.label}, tensor {one[0]}"), chunks)


class Staging:
    """The folders of one engine: in the area's folder `engines/NAME`, or in a `shared` one that an engine on another host
    sees under the same path."""

    def __init__(self, area: SharedArea, name: str, shared: Path | None = None) -> None:
        self.area = area
        self.folder = (shared or area.folder / "engines") / name
        self._apart = shared is not None
        self.clear()

    def clear(self) -> None:
        """Also what an earlier process of this engine was writing when it died."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.area.clear_filling(f"{self.folder.name}-")

    def prepare(self, file: HeldFile, manifest: Manifest, changed: Sequence[TensorEntry]) -> Path:
        """A folder with `changed`, which were verified. `file` must stay open while it is used. Raises NoRoomError."""
        folder = self.folder / manifest.label
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._apart:
            self._copy(folder / FILE_NAME, file, manifest, changed)
        elif len(changed) < len(manifest.tensors) or not file.link(folder / FILE_NAME):
            self._write(folder / FILE_NAME, file, manifest, changed)
        return folder

    def _copy(self, path: Path, file: HeldFile, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        """On another file system: written as a file is. Raises NoRoomError."""
        layout = lay_out({one.name: Form(one.dtype, one.shape) for one in changed}, manifest.label)
        try:
            with path.open("wb") as out:
                out.write(layout.header)
                for one in changed:
                    out.write(file.tensor(one.name))
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise NoRoomError(
                f"{path} cannot be written: {error.strerror}; see to engines.GROUP.weights_folder"
            ) from error

    def _write(self, path: Path, file: HeldFile, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        layout = lay_out({one.name: Form(one.dtype, one.shape) for one in changed}, manifest.label)
        name = f"{self.folder.name}-{manifest.label}"
        filling = self.area.begin(name, reuse=False)
        try:
            filling.write(layout.header, 0)
            for one in changed:
                filling.write(file.tensor(one.name), layout.offsets[one.name])
            filling.finish(layout.size_bytes)
            os.link(self.area.folder / "filling" / name, path)
        finally:
            filling.discard()
