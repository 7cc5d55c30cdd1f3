"""What an object store says of one version: its manifest, in which objects its chunks are, and a seal over all of it.

    objects/XX/DIGEST             bytes, named by their blake3 (XX: its last two digits)
    versions/LABEL.version        a sealed record, written when all its objects are there

Invariant: whoever accepts a record's seal can verify every byte of the version: the record names objects by blake3, which
nobody can forge. Without a key the seal shows damage; with one (a secret of the run) it shows who wrote it.
There is no head that could go backwards: the newest record by (epoch, number) is the head.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import blake3
import msgspec

from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError, RecordError
from physarum.bus.version import Fork, Version
from physarum.weightsync.digest import algorithm_of, is_digest
from physarum.weightsync.errors import BucketUnfitError, ManifestError
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mirror.bucket import Objects

_log = logging.getLogger(__name__)

OBJECTS: Final = "objects"
VERSIONS: Final = "versions"
_SUFFIX: Final = ".version"
_PURPOSE: Final = "physarum 2026-11 sealed record of a weight version"


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One object: chunks of the manifest, one behind the other."""

    digest: str
    size: int
    chunks: tuple[str, ...]

    @property
    def key(self) -> str:
        return object_key(self.digest)


class Attached(msgspec.Struct, frozen=True, array_like=True):
    """A file of the model's folder beside its weights (config.json, the tokenizer's): an object of its own."""

    name: str
    digest: str
    size: int

    @property
    def key(self) -> str:
        return object_key(self.digest)


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version as it was copied. `withdrawn`: what had been withdrawn by then, as in the head (states.Head)."""

    manifest: Manifest
    objects: tuple[Stored, ...]
    files: tuple[Attached, ...] = ()
    withdrawn: tuple[Fork, ...] = ()

    def __post_init__(self) -> None:
        sizes, found = self.manifest.sizes(), [digest for one in self.objects for digest in one.chunks]
        if sorted(found) != sorted(sizes):
            raise ManifestError(f"{self.manifest.label}: its objects hold {len(found)} chunks, not its {len(sizes)}")
        for one in self.objects:
            if not _is_blake3(one.digest) or one.size != sum(sizes[digest] for digest in one.chunks):
                raise ManifestError(f"{self.manifest.label}: object {one.digest} is not what its chunks are")
        strange = [file.name for file in self.files if not _is_plain(file.name) or not _is_blake3(file.digest)]
        if strange:
            raise ManifestError(f"{self.manifest.label}: {strange[0]!r} is no plain file name with a blake3 digest")

    def live(self) -> set[str]:
        """Keys of all its objects."""
        return {one.key for one in self.objects} | {file.key for file in self.files}


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    seal: str
    keyed: bool


def object_key(digest: str) -> str:
    return f"{OBJECTS}/{digest[-2:]}/{digest}"


def record_key(version: Version) -> str:
    return f"{VERSIONS}/{version}{_SUFFIX}"


def versions_in(objects: Objects) -> list[Version]:
    """Oldest first; what is named otherwise is somebody else's. Raises BucketError."""
    return sorted(version for key in objects.sizes(VERSIONS) if (version := _version(key)) is not None)


def seal(record: Record, key: str | None) -> bytes:
    body = encode(record)
    return encode(_Sealed(body, _sum(body, key), key is not None))


def opened(data: bytes, where: str, key: str | None) -> Record:
    """The record in `data`. Raises BucketUnfitError for what is damaged, or not sealed by `key` (None: by no key)."""
    try:
        sealed = decode(data, _Sealed)
        if sealed.keyed != (key is not None):
            found, remedy = ("a", "name it: checkpoint.versions.key_env, or --key-env") if sealed.keyed else ("no", "")
            raise BucketUnfitError(f"{where} is sealed with {found} key, expected the contrary; {remedy}".rstrip("; "))
        if _sum(sealed.body, key) != sealed.seal:
            raise BucketUnfitError(f"{where} does not have the seal that it should: it was altered, or by another key")
        return decode(sealed.body, Record)
    except (CodecError, ManifestError) as error:
        raise BucketUnfitError(f"{where} is no record of a version: {error}") from error


def read_record(objects: Objects, version: Version, key: str | None) -> Record:
    """Raises ObjectAbsentError, BucketUnfitError (also for a record of another version under its name), BucketError."""
    name = record_key(version)
    record = opened(objects.get(name), f"{objects.url}/{name}", key)
    if record.manifest.version != version:
        raise BucketUnfitError(f"{objects.url}/{name} is of {record.manifest.label}: it was renamed")
    return record


def newest_record(objects: Objects, key: str | None) -> Record | None:
    """The head: the newest version whose record can be read; None: there is none at all. Raises BucketUnfitError where none of
    those that are there can be, BucketError."""
    last: BucketUnfitError | None = None
    for version in reversed(versions_in(objects)):
        try:
            return read_record(objects, version, key)
        except BucketUnfitError as error:  # a write that was cut short; the next copy mends it
            _log.warning("%s; an older version is taken for the newest", error)
            last = last or error
    if last is not None:
        raise last
    return None


def _sum(body: bytes, key: str | None) -> str:
    if key is None:
        return str(blake3.blake3(body).hexdigest())
    derived = blake3.blake3(key.encode(), derive_key_context=_PURPOSE).digest()
    return str(blake3.blake3(body, key=derived).hexdigest())


def _version(key: str) -> Version | None:
    label = key.removeprefix(f"{VERSIONS}/")
    try:
        return Version.parse(label.removesuffix(_SUFFIX)) if label.endswith(_SUFFIX) else None
    except RecordError:
        return None


def _is_blake3(digest: str) -> bool:
    return is_digest(digest) and algorithm_of(digest) == "blake3"


def _is_plain(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".") and "\\" not in name
