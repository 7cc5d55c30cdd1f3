"""The manifests that a checkpoint service holds, on disk.

Invariant: a manifest that was accepted survives a restart, all its chunks are in the store, and no manifest older than
the newest of its model is ever accepted: (epoch, number) only grows, which fences a trainer that lost its lease.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from physarum.bus.errors import CodecError, RecordError
from physarum.bus.version import Version
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.durable import remove_asides, write_whole
from physarum.weightsync.errors import ChunksAbsentError, ManifestError, StaleVersionError
from physarum.weightsync.manifest import Manifest, content_digest, decode_manifest, encode_manifest

_SUFFIX: Final = ".manifest"
_NAMED_ABSENT: Final = 3
DEFAULT_GRACE_S: Final = 300.0


class Catalogue:
    """The manifests in `folder`, whose chunks are in `store`. `put` and `retain` block; call them one at a time."""

    def __init__(self, folder: Path, store: ChunkStore, fsync: bool = True) -> None:
        self.folder = folder
        self.store = store
        self._fsync = fsync
        folder.mkdir(parents=True, exist_ok=True)
        remove_asides(folder)
        # Replaced, never changed in place: readers on the event loop see it before or after a change made in a thread.
        self._held = {manifest.version: manifest for manifest in map(_load, folder.glob(f"*{_SUFFIX}"))}

    def all(self) -> list[Manifest]:
        """Oldest first, by (model, epoch, number)."""
        return [self._held[version] for version in sorted(self._held)]

    def get(self, label: str) -> Manifest | None:
        try:
            return self._held.get(Version.parse(label))
        except RecordError:
            return None

    def newest(self, model: str) -> Manifest | None:
        versions = [version for version in self._held if version.model == model]
        return self._held[max(versions)] if versions else None

    def put(self, manifest: Manifest) -> bool:
        """Accepts `manifest`; False when the same content was accepted under this version before.

        Raises StaleVersionError, ManifestError (another content under this version), ChunksAbsentError.
        """
        held = self._held.get(manifest.version)
        if held is not None:
            if content_digest(held) == content_digest(manifest):
                return False
            raise ManifestError(
                f"{manifest.label} was accepted with other content; versions never change, publish a new one"
            )
        newest = self.newest(manifest.version.model)
        if newest is not None and manifest.version < newest.version:
            raise StaleVersionError(
                f"{manifest.label} is older than {newest.label}, which was already accepted;"
                " a trainer that lost its lease must take a new epoch"
            )
        self._check_chunks(manifest)
        write_whole(self.folder / f"{manifest.label}{_SUFFIX}", [encode_manifest(manifest)], self._fsync)
        self._held = {**self._held, manifest.version: manifest}
        return True

    def retain(self, keep_last: int, protected: Collection[str] = (), grace_s: float = DEFAULT_GRACE_S) -> int:
        """Keeps the newest `keep_last` versions of each model and the `protected` labels, then sweeps; bytes freed.

        Chunks younger than `grace_s` stay: they may belong to a manifest that is still being uploaded.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least the newest version must stay")
        old = [version for version in self._beyond(keep_last) if str(version) not in protected]
        self._held = {version: manifest for version, manifest in self._held.items() if version not in old}
        for version in old:
            (self.folder / f"{version}{_SUFFIX}").unlink(missing_ok=True)
        live = {digest for manifest in self._held.values() for digest in manifest.sizes()}
        return self.store.sweep(live, grace_s)

    def _beyond(self, keep_last: int) -> list[Version]:
        models = {version.model for version in self._held}
        of_model = (sorted(version for version in self._held if version.model == model) for model in models)
        return [version for versions in of_model for version in versions[:-keep_last]]

    def _check_chunks(self, manifest: Manifest) -> None:
        absent = [digest for digest, size in manifest.sizes().items() if self.store.size(digest) != size]
        if absent:
            raise ChunksAbsentError(
                f"{manifest.label} names {len(absent)} chunks that are not here ({', '.join(absent[:_NAMED_ABSENT])});"
                " send them first",
                absent,
            )


def _load(file: Path) -> Manifest:
    try:
        manifest = decode_manifest(file.read_bytes())
    except CodecError as error:
        raise ManifestError(f"{file} is no manifest: {error}; restore it or move it away") from error
    if file.name != f"{manifest.label}{_SUFFIX}":
        raise ManifestError(f"{file} holds {manifest.label}; it was renamed by hand: restore its name or move it away")
    return manifest
