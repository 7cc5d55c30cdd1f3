"""What is asked of a mirror's process, and what it answers: one line of JSON each.

Invariant: a request is answered by any number of `Moved` and one other answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from physarum.bus.version import Fork

if TYPE_CHECKING:
    from physarum.bus.ledger import DurableRecord  # no record has one in it; it would bring the bus into the process


class Named(msgspec.Struct, frozen=True):
    """A checkpoint as the ledger names it. In a mirror its folder is `key`: one that is written again under the same name
    has another digest, so nothing there is ever overwritten by other bytes."""

    name: str
    digest: str

    @classmethod
    def of(cls, record: DurableRecord) -> Named:
        """As `record` names it."""
        return cls(record.folder, record.digest)

    @property
    def key(self) -> str:
        """Its folder in the mirror."""
        return f"{self.name}-{self.digest}"


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """Copy `checkpoint` from `folder`."""

    url: str
    folder: str
    checkpoint: Named


class Retain(msgspec.Struct, frozen=True, kw_only=True, tag="retain"):
    """Of `candidates` (oldest first) the newest `keep` that are whole there stay; nothing else of `known` does."""

    url: str
    candidates: list[Named]
    known: list[Named]
    keep: int


class Survey(msgspec.Struct, frozen=True, tag="survey"):
    """Which of them are there."""

    url: str
    checkpoints: list[Named]


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Compare every byte of them with its digest."""

    url: str
    checkpoints: list[Named]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Bring one into `folder`, which is there and empty."""

    url: str
    checkpoint: Named
    folder: str


class CopyVersion(msgspec.Struct, frozen=True, kw_only=True, tag="copy-version"):
    """Copy the version of `manifest` (encoded) out of this host's memory (`area`) or its `chunks`, with the files that are in
    `model` beside the weights; then the newest `keep` stay. `withdrawn`: as the head says; `key_env`: what seals the record."""

    url: str
    manifest: bytes
    area: str
    chunks: str
    model: str
    withdrawn: list[Fork]
    keep: int
    key_env: str | None


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """The store has taken or given something: it is not silent."""


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """So many bytes were sent; 0: it was there whole."""

    size_bytes: int


class Retained(msgspec.Struct, frozen=True, tag="retained"):
    """Keys that were let go."""

    removed: list[str]


class Surveyed(msgspec.Struct, frozen=True, tag="surveyed"):
    """Those that are whole there, as their listings say."""

    whole: list[Named]


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """For each that was asked for: what is wrong with it, "" for nothing."""

    faults: list[str]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """It is in the folder, every byte compared."""

    size_bytes: int


class VersionCopied(msgspec.Struct, frozen=True, tag="version-copied"):
    """So many objects and bytes were sent; none: all was there. Labels that were let go; `kept`: why others could not go."""

    objects: int
    size_bytes: int
    removed: list[str]
    kept: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`unfit`: another try would fail in the same way."""

    reason: str
    unfit: bool


Request = Copy | Retain | Survey | Verify | Fetch | CopyVersion
Answer = Moved | Copied | Retained | Surveyed | Verified | Fetched | VersionCopied | Failed


class Asked(msgspec.Struct, frozen=True):
    """A request, and the process that waits for its answer."""

    parent: int
    request: Request
