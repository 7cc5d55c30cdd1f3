"""A version out of an object store as a Hugging Face folder, for servers that know nothing of a run. Blocking.

    FOLDER/LABEL/model.safetensors, config.json, ...    one folder for each version, complete from the moment it is there
    FOLDER/current -> LABEL                             replaced in one step, forward only

Invariant: what `current` names is whole, and every byte of it was verified; no file that a server may have open is written to.
Chunks that the newest older version here has are copied, all others are read from the store. What an attempt that failed, or
was killed, had brought stays in FOLDER/.partial-LABEL, and the next one takes it up, of whichever version it was.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError, RecordError
from physarum.bus.version import Version, is_withdrawn
from physarum.weightsync.area import Filling
from physarum.weightsync.chunk_reader import Base, Difference
from physarum.weightsync.chunk_threads import ChunkQueue, ChunkThread, FillWork
from physarum.weightsync.digest import algorithm_of, digest_of
from physarum.weightsync.durable import sync_folder
from physarum.weightsync.errors import (
    BucketUnfitError,
    ChunkAlteredError,
    ChunkMissingError,
    ManifestError,
    NoRoomError,
    ObjectAbsentError,
    ServiceUnreachableError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.fetching import places_in
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import FILE_NAME, Form, lay_out
from physarum.weightsync.manifest import content_digest
from physarum.weightsync.mappings import forget_deleted, memory_of
from physarum.weightsync.mirror.reading import Mirror, MirrorHolder, MirrorReader, read_object
from physarum.weightsync.mirror.record import Record
from physarum.weightsync.pace import Pace
from physarum.weightsync.parallel import spread

_log = logging.getLogger(__name__)

CURRENT: Final = "current"
_MARK: Final = ".physarum-version"
_PARTIAL: Final = ".partial-"
_LEAVING: Final = ".leaving-"
"""Versions on their way out: a server may have their files open, so nothing is taken up from there."""
_LOCK: Final = ".pulling"
THREADS: Final = 16
"""Requests under way at once."""
AGAIN_S: Final = (0.5, 1.0, 2.0)
"""How long to wait after each failure, before the last try."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """`label` is in `folder`, and current; `new`: it was not before. Bytes came from the store, or were here: in an older
    version, or from an attempt that did not come to its end."""

    label: str
    folder: str
    new: bool
    fetched_bytes: int = 0
    reused_bytes: int = 0


def pull(mirror: Mirror, place: Path, label: str | None = None, keep: int = 2, known: Pulled | None = None) -> Pulled:
    """Makes the newest version, or the one named, current in `place`; the newest `keep` stay there. `known`: what the caller
    pulled last; while that is the newest one listing is all that is asked for.

    Raises ObjectAbsentError (no such version), BucketUnfitError (damaged there, withdrawn), BucketError, ChunkAlteredError,
    ChunkMissingError, ServiceUnreachableError (the store, for a chunk), StaleVersionError (the newest there is older than what
    is current), UpdateRefusedError (somebody else pulls there), NoRoomError: what is current stays so.
    """
    if known is not None and label is None and str(mirror.latest()) == known.label == str(current(place)):
        return Pulled(label=known.label, folder=known.folder, new=False)
    place.mkdir(parents=True, exist_ok=True)
    with _alone(place):
        record = _wanted(mirror, label)
        version, before = record.manifest.version, current(place)
        if label is None and before is not None and version < before:
            raise StaleVersionError(
                f"{mirror.url} has nothing newer than {version}, and {place / CURRENT} is {before}: the store was emptied, or"
                " belongs to another run; pull into another folder, or name the version"
            )
        target, counts = place / str(version), (0, 0)
        if not _is_here(target, record):
            counts = _in_time(mirror, record, place, target)
        if before != version:
            _switch(place, target.name)
        _retain(place, keep)
    forget_deleted()
    return Pulled(
        label=str(version),
        folder=str(target),
        new=before != version,
        fetched_bytes=counts[0],
        reused_bytes=counts[1],
    )


def current(place: Path) -> Version | None:
    """What `current` names; None: nothing yet."""
    try:
        return Version.parse(os.readlink(place / CURRENT))
    except (OSError, RecordError):
        return None


def _wanted(mirror: Mirror, label: str | None) -> Record:
    newest = mirror.newest()
    if newest is None:
        raise ObjectAbsentError(
            f"{mirror.url} has no version; see to the URL and the run's name, or wait for the first"
        )
    if label is None or newest.manifest.label == label:
        return newest
    version = Version.parse(label)
    if is_withdrawn(version, newest.withdrawn):
        raise BucketUnfitError(f"{label} was withdrawn, as {newest.manifest.label} says; pull that one")
    return mirror.record(version)


def _in_time(mirror: Mirror, record: Record, place: Path, target: Path) -> tuple[int, int]:
    """As `_bring`; says so where the store let go of the version meanwhile: so may it of each, and none would ever come."""
    began = time.monotonic()
    try:
        return _bring(mirror, record, place, target)
    except (ChunkMissingError, ObjectAbsentError) as error:
        if mirror.has(record.manifest.version):
            raise
        raise ChunkMissingError(
            f"{mirror.url} let go of {target.name} within {time.monotonic() - began:.0f} s, while it was pulled: versions go"
            " there faster than they are read here. Let more of them stay (checkpoint.versions.keep), or copy fewer"
            " (checkpoint.versions.every)"
        ) from error


def _bring(mirror: Mirror, record: Record, place: Path, target: Path) -> tuple[int, int]:
    """The version, whole, under its name; bytes read from the store, and found here. Raises as `pull`."""
    aside = place / f"{_PARTIAL}{target.name}"
    try:
        _take_up(place, aside)
        for file in record.files:
            _write(aside / file.name, read_object(mirror.objects, file))
        counts = _fill(aside / FILE_NAME, record, mirror, place)
        _write(aside / _MARK, encode(record))
        sync_folder(aside)
        aside.rename(target)
        sync_folder(place)
        return counts
    except NoRoomError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise NoRoomError(f"{error.filename or aside} cannot be written: {error.strerror or error}") from error


def _take_up(place: Path, aside: Path) -> None:
    """`aside` holds what the last attempt brought of the weights, if any, and nothing else; of others nothing is left."""
    left = sorted(place.glob(f"{_PARTIAL}*"), key=lambda path: (path == aside, path.stat().st_mtime))
    if left and left[-1] != aside:
        left[-1].rename(aside)
    aside.mkdir(exist_ok=True)
    for path in aside.iterdir():
        if path.name != FILE_NAME:
            path.unlink()
    _clear(place, but=aside)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _fill(path: Path, record: Record, mirror: Mirror, place: Path) -> tuple[int, int]:
    """Bytes read from the store, and found in `path` or in the newest older version here."""
    manifest, sizes = record.manifest, record.manifest.sizes()
    layout = lay_out({one.name: Form(one.dtype, one.shape) for one in manifest.tensors}, manifest.label)
    with ExitStack() as stack:
        filling = Filling(path, _opened(path, layout.size_bytes))
        stack.callback(filling.close)
        filling.reserve(layout.size_bytes)
        filling.write(layout.header, 0)
        memory = memoryview(memory_of(filling.descriptor, writable=True))
        base, known = _base(place, stack)
        places = places_in(manifest, layout)
        here = _brought(memory, places, sizes) if filling.old_bytes else set()
        work = FillWork(filling, memory, places, base, known, {}, lambda digest, came_as: None)
        holder = MirrorHolder(mirror, manifest, record)
        made = [ChunkThread(work, [_Patient(holder.reader())], Pace("never")) for _ in range(THREADS)]
        missing = {digest: size for digest, size in sizes.items() if digest not in here}
        _run(made, ChunkQueue(missing, shuffled=False))
        os.fsync(filling.descriptor)
    found = sum(sizes[digest] for digest in here)
    return sum(one.fetched for one in made), sum(one.reused for one in made) + found


def _opened(path: Path, size_bytes: int) -> int:
    """To be filled; what is there of another size is of another model."""
    if path.exists() and path.stat().st_size != size_bytes:
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _brought(memory: memoryview, places: Mapping[str, Sequence[int]], sizes: Mapping[str, int]) -> set[str]:
    """The chunks that stand undamaged in all their places."""

    def stands(digest: str) -> bool:
        parts = (memory[offset : offset + sizes[digest]] for offset in places[digest])
        return all(digest_of(part, algorithm_of(digest)) == digest for part in parts)

    digests = list(sizes)
    return {digest for digest, is_here in zip(digests, spread(stands, digests), strict=True) if is_here}


class _Patient:
    """A reader that asks again: one bad answer of tens of thousands must not cost all that was read before it."""

    def __init__(self, reader: MirrorReader) -> None:
        self.url, self.close, self._reader = reader.url, reader.close, reader

    def read_into(self, digest: str, target: memoryview, base: Base | None = None) -> Difference | None:
        for wait_s in AGAIN_S:
            try:
                return self._reader.read_into(digest, target, base)
            except (ServiceUnreachableError, ChunkAlteredError) as error:
                _log.warning("%s; asking again in %g s", error, wait_s)
                time.sleep(wait_s)
        return self._reader.read_into(digest, target, base)


def _run(threads: list[ChunkThread], queue: ChunkQueue) -> None:
    """Raises what the first failing one raised; the others end with the chunk that they are at."""
    with ThreadPoolExecutor(len(threads), thread_name_prefix="pull") as pool:
        running = [pool.submit(thread.run, queue) for thread in threads]
        try:
            for one in running:
                one.result()
        finally:
            queue.end()


def _base(place: Path, stack: ExitStack) -> tuple[HeldFile | None, dict[str, tuple[int, int]]]:
    """The newest version here, and where its chunks are; nothing, where there is none or it is damaged."""
    for version in reversed(_versions(place)):
        record = _record_in(place / str(version))
        if record is None:
            continue
        try:
            descriptor = os.open(place / str(version) / FILE_NAME, os.O_RDONLY)
            file = stack.enter_context(HeldFile(descriptor))
            return file, file.places(record.manifest)
        except (OSError, ManifestError, ChunkAlteredError):
            continue  # it is of no use, and nobody asked for it
    return None, {}


def _switch(place: Path, name: str) -> None:
    made = place / f".{CURRENT}"
    made.unlink(missing_ok=True)
    made.symlink_to(name)
    os.replace(made, place / CURRENT)
    sync_folder(place)


def _retain(place: Path, keep: int) -> None:
    """Files that a server has open stay its own until it closes them. What goes loses its name first: under that is a whole
    version or none, whenever this process is killed."""
    for version in _versions(place)[:-keep]:
        if version != current(place):
            with suppress(OSError):  # it stays, and goes with the next version
                (place / str(version)).rename(place / f"{_LEAVING}{version}")
    _clear(place)


def _clear(place: Path, but: Path | None = None) -> None:
    """What was on its way here, or out, when a pull ended early."""
    for left in (*place.glob(f"{_PARTIAL}*"), *place.glob(f"{_LEAVING}*")):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def _versions(place: Path) -> list[Version]:
    """That are whole here, oldest first; what is named otherwise is somebody else's."""
    found = []
    for path in place.glob(f"*/{_MARK}"):
        try:
            found.append(Version.parse(path.parent.name))
        except RecordError:
            continue
    return sorted(one for one in found if not (place / str(one)).is_symlink())


def _is_here(folder: Path, record: Record) -> bool:
    """Raises BucketUnfitError where the folder has other content under this name: a server may be reading it."""
    found = _record_in(folder)
    if found is not None and content_digest(found.manifest) != content_digest(record.manifest):
        raise BucketUnfitError(f"{folder} was pulled from another run; pull into another folder")
    return found is not None


def _record_in(folder: Path) -> Record | None:
    """What was pulled into it; None: nothing whole."""
    try:
        return decode((folder / _MARK).read_bytes(), Record)
    except (OSError, CodecError, ManifestError):
        return None


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpdateRefusedError(f"another process pulls into {place}; end it, or choose another folder") from error
        yield
    finally:
        os.close(descriptor)
