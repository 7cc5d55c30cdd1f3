"""Training checkpoints on disk: written aside, digested, fsynced, renamed; a crash at any byte leaves the old or the new.

checkpoints/<epoch>.<number>/  rank files (torch side), meta.msgpack (cursor, counters), digests.msgpack

Plans that change no weights leave the number: a second checkpoint of it is <epoch>.<number>.<steps>, beside the first.
Invariant: what the ledger may name is never written over, since a crash comes before the record of what replaces it, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.cursor import CursorRecord
from physarum.actors.trainer.digests import DIGESTS, digest_of, file_digest, read_digests, write_digests
from physarum.bus.blobs import fsync_folder
from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError

_META: Final = "meta.msgpack"
_MIRRORING: Final = ".mirroring-"
_RESTORING: Final = ".restoring-"


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a training state besides tensors. `steps` counts executed plans, `trained_s` training seconds."""

    epoch: int
    number: int
    steps: int
    trained_s: float
    cursor: CursorRecord


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def aside(self, epoch: int) -> Path:
        """An empty folder to write the next one into; leftovers of this and earlier epochs are removed.

        Never a later epoch's: a trainer that lost its lease must not touch what its successor is writing. Such a one may be
        writing still: what it puts there meanwhile is removed the next time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self.folder / f".writing-{epoch}"
        for leftover in self.folder.glob(".writing-*"):
            if int(leftover.name.removeprefix(".writing-")) <= epoch:
                shutil.rmtree(leftover, ignore_errors=leftover != made)
        made.mkdir()
        return made

    def commit(self, aside: Path, meta: CheckpointMeta, name: str | None = None) -> tuple[str, Path]:
        """Makes what is in `aside` the checkpoint of `meta`, called `name` if that is given; returns its digest and folder.
        Blocking."""
        (aside / _META).write_bytes(encode(meta))
        files = {file.name: file_digest(file) for file in sorted(aside.iterdir())}
        (aside / DIGESTS).write_bytes(write_digests(files))
        return digest_of(files), self.place(aside, self._free(meta) if name is None else name)

    def place(self, aside: Path, name: str) -> Path:
        """Makes what is in `aside` durable and the checkpoint `name`, in the place of one that is there. Blocking."""
        for file in aside.iterdir():
            _fsync(file)
        fsync_folder(aside)
        target = self.folder / name
        if target.exists():
            shutil.rmtree(target)  # of these very steps and never recorded as durable, or damaged and brought back
        os.replace(aside, target)
        fsync_folder(self.folder)
        return target

    def _free(self, meta: CheckpointMeta) -> str:
        plain = f"{meta.epoch}.{meta.number}"
        return f"{plain}.{meta.steps}" if (self.folder / plain).exists() else plain

    def linked(self, name: str) -> Path:
        """A second folder of the same files, which stays when the checkpoint is let go or written again. Blocking."""
        made = Path(tempfile.mkdtemp(prefix=f"{_MIRRORING}{name}-", dir=self.folder))
        try:
            for file in (self.folder / name).iterdir():
                os.link(file, made / file.name)
        except OSError:
            shutil.rmtree(made)
            raise
        return made

    def restoring(self, name: str) -> Path:
        """An empty folder to bring the checkpoint `name` back into, for `place`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{_RESTORING}{name}-", dir=self.folder))

    def clear_leftovers(self) -> None:
        """Removes what a killed process was copying from or bringing back. Blocking."""
        for prefix in (_MIRRORING, _RESTORING):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def load(self, name: str, expected_digest: str) -> tuple[Path, CheckpointMeta]:
        """Verifies every file. Raises UnrecoverableError naming the file that is missing or altered."""
        folder = self.folder / name
        try:
            files = read_digests((folder / DIGESTS).read_bytes())
        except (FileNotFoundError, CodecError) as error:
            raise UnrecoverableError(
                f"checkpoint {folder} cannot be read ({error}); restore it from a copy, or remove the run and start anew"
            ) from error
        if digest_of(files) != expected_digest:
            raise UnrecoverableError(
                f"checkpoint {folder} has digest {digest_of(files)}; the ledger says {expected_digest}: it was altered"
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
    found = file_digest(file)
    if found != digest:
        raise UnrecoverableError(f"checkpoint file {file} has digest {found}, expected {digest}: it was altered")


def _fsync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
