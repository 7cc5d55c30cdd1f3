"""Training checkpoints on disk: written aside, digested, fsynced, renamed; a crash at any byte leaves the old or the new.

checkpoints/<epoch>.<number>/  rank files (torch side), meta.msgpack (cursor, counters), digests.msgpack
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.cursor import CursorRecord
from physarum.bus.blobs import fsync_folder
from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError

_META: Final = "meta.msgpack"
_DIGESTS: Final = "digests.msgpack"
_READ_BYTES: Final = 8 << 20


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a training state besides tensors. `steps` counts executed plans, `trained_s` training seconds."""

    epoch: int
    number: int
    steps: int
    trained_s: float
    cursor: CursorRecord


class _Digests(msgspec.Struct, frozen=True):
    files: dict[str, str]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def aside(self, epoch: int) -> Path:
        """An empty folder to write the next one into; leftovers of this and earlier epochs are removed.

        Never a later epoch's: a trainer that lost its lease must not touch what its successor is writing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".writing-*"):
            if int(leftover.name.removeprefix(".writing-")) <= epoch:
                shutil.rmtree(leftover)
        made = self.folder / f".writing-{epoch}"
        made.mkdir()
        return made

    def commit(self, aside: Path, meta: CheckpointMeta) -> tuple[str, Path]:
        """Makes what is in `aside` the checkpoint of (epoch, number); returns its digest and folder. Blocking."""
        (aside / _META).write_bytes(encode(meta))
        files = {file.name: _file_digest(file) for file in sorted(aside.iterdir())}
        (aside / _DIGESTS).write_bytes(encode(_Digests(files)))
        for file in aside.iterdir():
            _fsync(file)
        fsync_folder(aside)
        target = self.folder / f"{meta.epoch}.{meta.number}"
        if target.exists():
            shutil.rmtree(target)  # of this very epoch: written before, never recorded as durable
        os.replace(aside, target)
        fsync_folder(self.folder)
        return _digest_of(files), target

    def load(self, name: str, expected_digest: str) -> tuple[Path, CheckpointMeta]:
        """Verifies every file. Raises UnrecoverableError naming the file that is missing or altered."""
        folder = self.folder / name
        try:
            files = decode((folder / _DIGESTS).read_bytes(), _Digests).files
        except (FileNotFoundError, CodecError) as error:
            raise UnrecoverableError(
                f"checkpoint {folder} cannot be read ({error}); restore it from a copy, or remove the run and start anew"
            ) from error
        if _digest_of(files) != expected_digest:
            raise UnrecoverableError(
                f"checkpoint {folder} has digest {_digest_of(files)}; the ledger says {expected_digest}: it was altered"
            )
        for file, digest in files.items():
            _verify(folder / file, digest)
        return folder, decode((folder / _META).read_bytes(), CheckpointMeta)

    def retain(self, keep: list[str]) -> None:
        """Removes all checkpoints that are not named in `keep`."""
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder.name not in keep and not folder.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(folder)


def _verify(file: Path, digest: str) -> None:
    if not file.is_file():
        raise UnrecoverableError(f"checkpoint file {file} is missing; restore it from a copy of the run folder")
    found = _file_digest(file)
    if found != digest:
        raise UnrecoverableError(f"checkpoint file {file} has digest {found}, expected {digest}: it was altered")


def _digest_of(files: dict[str, str]) -> str:
    listing = "\n".join(f"{name} {digest}" for name, digest in sorted(files.items()))
    return xxhash.xxh3_128_hexdigest(listing.encode())


def _file_digest(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()


def _fsync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
