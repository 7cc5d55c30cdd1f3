"""The manifests that a checkpoint service holds, on disk, and where the bytes of each are.

Invariant: a manifest that was accepted survives a restart of the service, and no manifest older than the newest of its model
is ever accepted: (epoch, number) only grows, which fences a trainer that lost its lease. The bytes of a version are either
one file of the host's area, or chunks that are all in the store; one that lost its bytes (the host was started anew, and its
memory with it) is no longer offered, and goes on fencing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final

from physarum.bus.errors import CodecError, RecordError
from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.difference import encode_difference
from physarum.weightsync.differences import Differences
from physarum.weightsync.durable import remove_asides, write_whole
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ChunksAbsentError,
    ManifestError,
    StaleVersionError,
)
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, content_digest, decode_manifest, encode_manifest

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".manifest"
_NAMED_ABSENT: Final = 3
DEFAULT_GRACE_S: Final = 300.0


class _Whole:
    """A version whose bytes are one file."""

    def __init__(self, file: HeldFile, manifest: Manifest) -> None:
        self.file = file
        self.places = file.places(manifest)


class _GivenUpError(Exception):
    """A file went while its chunk was wanted."""


class Catalogue:
    """The manifests in `folder`, whose bytes are in `area` or `store`. `put` and `retain` block; call them one at a time."""

    def __init__(self, folder: Path, store: ChunkStore, fsync: bool = True, area: SharedArea | None = None) -> None:
        self.folder = folder
        self.store = store
        self.area = area
        self._fsync = fsync
        folder.mkdir(parents=True, exist_ok=True)
        remove_asides(folder)
        # Replaced, never changed in place: readers on the event loop see them before or after a change made in a thread.
        self._held = {manifest.version: manifest for manifest in manifests_in(folder)}
        self._whole: dict[Version, _Whole] = {}
        self._differences = Differences()
        self._lost: set[Version] = set()
        """Accepted, but their bytes are gone: nothing older is accepted all the same."""
        self._find_bytes()

    def all(self) -> list[Manifest]:
        """Oldest first, by (model, epoch, number)."""
        return [self._held[version] for version in sorted(self._held)]

    def get(self, label: str) -> Manifest | None:
        try:
            return self._held.get(Version.parse(label))
        except RecordError:
            return None

    def version(self, label: str) -> tuple[HeldFile, Manifest] | None:
        """A version whose bytes are one file, to be read while that is in use."""
        manifest = self.get(label)
        whole = self._whole.get(manifest.version) if manifest is not None else None
        return (whole.file, manifest) if whole is not None and manifest is not None else None

    def newest(self, model: str) -> Manifest | None:
        versions = [version for version in self._held if version.model == model]
        return self._held[max(versions)] if versions else None

    def chunk(self, digest: str) -> tuple[HeldFile, int, int] | None:
        """(File, offset, bytes) of a chunk of a version that is one file, to be read while that is in use.

        None: ask the store.
        """
        for whole in reversed(self._whole.values()):
            place = whole.places.get(digest)
            if place is not None:
                return whole.file, *place
        return None

    def difference(self, digest: str, base: str, width: int) -> bytes | None:
        """A chunk as what differs from another, where both are in files; None: it is not, or saves nothing. Blocking."""
        places = self.chunk(digest), self.chunk(base)
        if places[0] is None or places[1] is None:
            return None
        (new, *new_place), (old, *old_place) = places[0], places[1]

        def compute() -> bytes | None:
            with new.using() as new_is_here, old.using() as old_is_here:
                if not new_is_here or not old_is_here:
                    raise _GivenUpError
                return encode_difference(new.slice(*new_place), old.slice(*old_place), width)

        try:
            return self._differences.get((digest, base, width), compute)
        except _GivenUpError:
            return None  # not remembered: the chunk may come back with another version

    def put(self, manifest: Manifest, filled: str | None = None) -> bool:
        """Accepts `manifest`; False when the same content was accepted under this version before. `filled`: the name of the
        file in the area that holds its bytes; without it they must be in the store.

        Raises StaleVersionError, ManifestError (another content under this version), ChunksAbsentError, ChunkMissingError
        (no such file).
        """
        held = self._held.get(manifest.version)
        if held is not None:
            if content_digest(held) == content_digest(manifest):
                return False
            raise ManifestError(
                f"{manifest.label} was accepted with other content; versions never change, publish a new one"
            )
        newest = max((one for one in (*self._held, *self._lost) if one.model == manifest.version.model), default=None)
        if newest is not None and manifest.version < newest:
            raise StaleVersionError(
                f"{manifest.label} is older than {newest}, which was already accepted;"
                " a trainer that lost its lease must take a new epoch"
            )
        if filled is None:
            self._check_chunks(manifest)
        else:
            self._hold(manifest, filled)
        write_whole(self.folder / f"{manifest.label}{_SUFFIX}", [encode_manifest(manifest)], self._fsync)
        self._held = {**self._held, manifest.version: manifest}
        return True

    def retain(self, keep_last: int, protected: Collection[str] = (), grace_s: float = DEFAULT_GRACE_S) -> int:
        """Keeps the newest `keep_last` versions of each model and the `protected` labels, then sweeps; bytes freed.

        Chunks younger than `grace_s` stay: they may belong to a manifest that is still being uploaded.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least the newest version must stay")
        self._forget_lost()
        old = [version for version in self._beyond(keep_last) if str(version) not in protected]
        self._held = {version: manifest for version, manifest in self._held.items() if version not in old}
        for version in old:
            (self.folder / f"{version}{_SUFFIX}").unlink(missing_ok=True)
            self._drop_file(version)
        self._drop_strangers()
        live = {
            digest
            for version, manifest in self._held.items()
            if version not in self._whole
            for digest in manifest.sizes()
        }
        return self.store.sweep(live, grace_s)

    def close(self) -> None:
        """Reads nothing any more; what is held stays."""
        self._differences.close()
        for whole in self._whole.values():
            whole.file.close()

    def _find_bytes(self) -> None:
        """After a start: opens the files, sets versions without bytes aside, gives up files without a manifest."""
        for version, manifest in sorted(self._held.items()):
            whole = self._opened(manifest)
            if whole is not None:
                self._whole[version] = whole
            elif self._absent(manifest):
                _log.warning("%s has no bytes here any more: they were in memory that is gone", manifest.label)
                self._lost.add(version)
                del self._held[version]
        if self.area is not None:
            for label in self.area.labels():
                if Version.parse(label) not in self._held:
                    self.area.give_up(label)

    def _opened(self, manifest: Manifest) -> _Whole | None:
        """The file that the area has for a version; one that is not what the manifest says is given up, in sight."""
        if self.area is None:
            return None
        file = None
        try:
            file = HeldFile.open(self.area, manifest.label)
            return _Whole(file, manifest) if file is not None else None
        except (ChunkAlteredError, ManifestError) as error:
            _log.error("%s: its file is given up, it is damaged: %s", manifest.label, error)
            if file is not None:
                file.close()
            self.area.give_up(manifest.label)
            return None

    def _forget_lost(self) -> None:
        """Where something newer is held, it is the fence."""
        for version in [
            one for one in self._lost if any(one.model == held.model and one < held for held in self._held)
        ]:
            (self.folder / f"{version}{_SUFFIX}").unlink(missing_ok=True)
            self._lost.discard(version)

    def _hold(self, manifest: Manifest, filled: str) -> None:
        if manifest.version in self._whole:
            return  # its manifest could not be written, and the publisher repeats itself
        area = self.area
        file = None
        if area is not None:
            area.hold(filled, manifest.label)
            file = HeldFile.open(area, manifest.label)
        if area is None or file is None:
            raise ChunkMissingError(f"no file {filled} was filled for {manifest.label} on this host")
        try:
            self._whole = {**self._whole, manifest.version: _Whole(file, manifest)}
        except ManifestError:
            file.close()
            area.give_up(manifest.label)
            raise

    def _drop_strangers(self) -> None:
        """Files older than the newest version that no manifest names: fetched by an engine beside, or never accepted."""
        if self.area is None:
            return
        for version in map(Version.parse, self.area.labels()):
            newest = self.newest(version.model)
            if version not in self._held and newest is not None and version < newest.version:
                self._drop_file(version)

    def _drop_file(self, version: Version) -> None:
        whole = self._whole.get(version)
        if whole is not None:
            self._whole = {other: one for other, one in self._whole.items() if other != version}
            whole.file.close()
        if self.area is not None:
            self.area.give_up(str(version))

    def _beyond(self, keep_last: int) -> list[Version]:
        models = {version.model for version in self._held}
        of_model = (sorted(version for version in self._held if version.model == model) for model in models)
        return [version for versions in of_model for version in versions[:-keep_last]]

    def _absent(self, manifest: Manifest) -> list[str]:
        return [digest for digest, size in manifest.sizes().items() if self.store.size(digest) != size]

    def _check_chunks(self, manifest: Manifest) -> None:
        absent = self._absent(manifest)
        if absent:
            raise ChunksAbsentError(
                f"{manifest.label} names {len(absent)} chunks that are not here ({', '.join(absent[:_NAMED_ABSENT])});"
                " send them first",
                absent,
            )


def manifests_in(folder: Path) -> list[Manifest]:
    """All manifests in a catalogue's folder, oldest first by (model, epoch, number). Raises ManifestError."""
    return sorted(map(_load, folder.glob(f"*{_SUFFIX}")), key=lambda manifest: manifest.version)


def _load(file: Path) -> Manifest:
    try:
        manifest = decode_manifest(file.read_bytes())
    except CodecError as error:
        raise ManifestError(f"{file} is no manifest: {error}; restore it or move it away") from error
    if file.name != f"{manifest.label}{_SUFFIX}":
        raise ManifestError(f"{file} holds {manifest.label}; it was renamed by hand: restore its name or move it away")
    return manifest
