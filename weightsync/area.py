"""The weights of one run in the memory of a host: whole versions as files that change hands by name and are never copied.

    spare/     files that may be overwritten: memory that is there is ten times cheaper than memory that must be found
    filling/   being written, by a publisher or by whoever fetches for this host
    held/      LABEL.safetensors, complete; nobody writes to it
    engines/   what single engines load

Invariant: a file under held/ is not written to. It becomes spare only while nobody reads it (flock); otherwise it is
unlinked, and its readers keep what they opened. All methods block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from physarum.bus.version import Version
from physarum.weightsync.digest import digest_of
from physarum.weightsync.errors import ManifestError, NoRoomError
from physarum.weightsync.mappings import memory_of

SUFFIX: Final = ".safetensors"
_SERVED: Final = "served"
_OWNER: Final = "owner"
_USED: Final = "used"
_SPARES: Final = 1
_SHARED_MEMORY: Final = Path("/dev/shm")
_NAME_DIGITS: Final = 8
_BLOCK_BYTES: Final = 512
"""Of st_blocks, whatever the file system's blocks are (stat(2))."""


class SharedArea:
    """The area in `folder`. Any number of processes of a host use one at the same time; who only looks makes nothing."""

    def __init__(self, folder: Path, only_look: bool = False) -> None:
        self.folder = folder
        self._used: int | None = None
        if only_look:
            return
        for part in ("spare", "filling", "held", "engines"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        # Says that somebody is here, for as long as this process is.
        self._used = os.open(folder / _USED, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._used, fcntl.LOCK_SH)

    def __del__(self) -> None:
        if self._used is not None:
            os.close(self._used)

    @classmethod
    def of_run(cls, run_folder: Path, model_bytes: int, versions: int, only_look: bool = False) -> SharedArea:
        """In shared memory where `versions` models take at most half of it, else on the disk of the run. Every process of a
        host finds the same one: two runs of one name, or another run's old area, are told apart by the folder's path."""
        memory, disk = _places(run_folder)
        there = shutil.disk_usage(_SHARED_MEMORY).total if os.access(_SHARED_MEMORY, os.W_OK) else 0
        if 2 * versions * model_bytes > there:
            return cls(disk, only_look)
        if only_look:
            return cls(memory, only_look)
        _remove_orphans(memory.parent)
        area = cls(memory)
        (memory / _OWNER).write_text(str(run_folder.resolve()))
        return area

    @staticmethod
    def remove_of_run(run_folder: Path) -> None:
        """Once nobody of the run is left on this host: gives the memory back."""
        for place in _places(run_folder):
            shutil.rmtree(place, ignore_errors=True)

    def begin(self, name: str, reuse: bool = True) -> Filling:
        """A file to be written: a spare one as it is, or a new one (always, unless `reuse`: a small file would waste it). What
        was being written under this name is given up."""
        target = self.folder / "filling" / name
        target.unlink(missing_ok=True)
        for spare in (self.folder / "spare").iterdir() if reuse else ():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                spare.rename(target)
                descriptor = os.open(target, os.O_RDWR)
                if _locked(descriptor, fcntl.LOCK_EX):
                    return Filling(target, descriptor)
                os.close(descriptor)  # somebody still reads it
                target.unlink()
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Filling(target, descriptor)

    def hold(self, name: str, label: str) -> Path | None:
        """Gives what was filled under `name` its label; None when it is not here (it was filled on another host)."""
        held = self.path(label)
        if Path(name).name != name:
            raise ManifestError(f"{name!r} is no name of a file in {self.folder}/filling")
        try:
            (self.folder / "filling" / name).rename(held)
        except FileNotFoundError:
            return None
        return held

    def path(self, label: str) -> Path:
        """Where a version is, or would be. Raises RecordError for what is no label (and no file name)."""
        return self.folder / "held" / f"{Version.parse(label)}{SUFFIX}"

    def open(self, label: str, flags: int = os.O_RDONLY) -> int | None:
        """A descriptor of a version, locked against reuse until it is closed; None when it is not here."""
        path = self.path(label)
        while True:
            try:
                descriptor = os.open(path, flags)
            except FileNotFoundError:
                return None
            if not _locked(descriptor, fcntl.LOCK_SH):
                os.close(descriptor)
                return None  # whoever gives it up holds it, perhaps for long: a stopped process keeps its locks
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
            os.close(descriptor)  # given up between the two calls: it may be overwritten

    def labels(self) -> list[str]:
        """Of the versions that are here."""
        return [path.name.removesuffix(SUFFIX) for path in (self.folder / "held").glob(f"*{SUFFIX}")]

    def give_up(self, label: str) -> None:
        """The version is no longer here; its memory is used again, unless somebody reads it."""
        descriptor = self.open(label, os.O_RDWR)  # NFS gives nobody an exclusive lock who may not write
        if descriptor is None:
            return
        try:
            path, spares = self.path(label), self.folder / "spare"
            with contextlib.suppress(FileNotFoundError):
                if sum(1 for _ in spares.iterdir()) < _SPARES and _locked(descriptor, fcntl.LOCK_EX):
                    path.rename(spares / f"{os.getpid()}-{path.name}")
                else:
                    path.unlink()
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """While it lasts a checkpoint service says what stays here."""
        descriptor = os.open(self.folder / _SERVED, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def alone(self, label: str) -> int:
        """Waits until nobody else of this host fetches `label`; a descriptor to close when that is done."""
        descriptor = os.open(self.folder / "filling" / f".{Version.parse(label)}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def retain(self, keep_last: int) -> None:
        """Gives up all but the newest `keep_last` versions of each model, unless a checkpoint service does that."""
        descriptor = os.open(self.folder / _SERVED, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                return
            self._retain(keep_last)
        finally:
            os.close(descriptor)

    def _retain(self, keep_last: int) -> None:
        versions = sorted(Version.parse(label) for label in self.labels())
        for model in {version.model for version in versions}:
            for version in [one for one in versions if one.model == model][:-keep_last]:
                self.give_up(str(version))
                (self.folder / "filling" / f".{version}").unlink(missing_ok=True)

    def clear_abandoned(self, prefix: str) -> None:
        """Removes what writers that died have left, by whoever: a living one holds its lock."""
        for path in (self.folder / "filling").glob(f"{prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    if _locked(descriptor, fcntl.LOCK_EX):
                        path.unlink()
                finally:
                    os.close(descriptor)

    def clear_filling(self, prefix: str) -> None:
        """Removes what writers that died have left: only for the one who may write under this prefix."""
        for path in (self.folder / "filling").glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


class Filling:
    """A file that one process writes, `path` None where it has no name. `close` without `SharedArea.hold` leaves it for
    `clear_filling`."""

    def __init__(self, path: Path | None, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.old_bytes = os.fstat(descriptor).st_size if path is not None else 0
        """Of the version that was here before, with what it held."""
        self._room = self.old_bytes
        """Bytes whose memory is there."""

    @classmethod
    def joined(cls, path: Path, old_bytes: int) -> Filling:
        """For another process that writes a part of it, while the one that began it waits. Raises NoRoomError when it is gone.

        `old_bytes` as it was at the beginning: the file grows under all who write.
        """
        try:
            made = cls(path, os.open(path, os.O_RDWR))
        except FileNotFoundError as error:
            raise NoRoomError(f"{path} was given up while it was written: another trainer has begun anew") from error
        made.old_bytes = made._room = old_bytes
        return made

    @classmethod
    def anonymous(cls) -> Filling:
        """In memory that ends with its last reader."""
        return cls(None, os.memfd_create("weights"))

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Raises NoRoomError when the memory (or disk) is full."""
        view, written = memoryview(data), 0
        if offset + view.nbytes <= self._room:
            # Into memory that is there: no system call copies as fast (writes to one file wait for each other), and none of it
            # can be refused.
            target = np.frombuffer(memory_of(self.descriptor, writable=True), np.uint8)
            np.copyto(target[offset : offset + view.nbytes], np.frombuffer(view, np.uint8))
            return
        try:
            while written < view.nbytes:
                written += os.pwrite(self.descriptor, view[written:], offset + written)
        except OSError as error:
            raise NoRoomError(
                f"{self.path or 'memory for weights'} cannot be written at byte {offset + written}: {error.strerror}."
                " Free some, or enlarge /dev/shm"
            ) from error

    def reserve(self, size_bytes: int) -> None:
        """The file has at least this size, and room for it. Raises NoRoomError."""
        state = os.fstat(self.descriptor)
        try:
            # Where it is there: to ask the system page by page takes as long as to copy.
            if state.st_size < size_bytes or state.st_blocks * _BLOCK_BYTES < size_bytes:
                os.posix_fallocate(self.descriptor, 0, size_bytes)
        except OSError as error:
            raise NoRoomError(
                f"{self.path or 'memory for weights'} has no room for {size_bytes} bytes: {error.strerror}. Free some, or"
                " enlarge /dev/shm"
            ) from error
        self._room = size_bytes

    def finish(self, size_bytes: int) -> None:
        """All is written: what a longer version left behind is cut off, and readers may come."""
        os.ftruncate(self.descriptor, size_bytes)
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self.descriptor)

    def discard(self) -> None:
        """Nothing of it is left, unless it was held meanwhile."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def _places(run_folder: Path) -> tuple[Path, Path]:
    """In memory, on disk."""
    path = run_folder.resolve()
    name = f"{path.name}-{digest_of(str(path).encode())[:_NAME_DIGITS]}"
    return _SHARED_MEMORY / f"physarum-{os.getuid()}" / name, path / "weights" / "area"


def _remove_orphans(root: Path) -> None:
    """Areas of runs whose folder was deleted: nobody else gives their memory back."""
    for owner in root.glob(f"*/{_OWNER}"):
        with contextlib.suppress(FileNotFoundError):  # its own run ends just now
            run_folder = owner.read_text()
            if run_folder and not Path(run_folder).exists() and not _in_use(owner.parent):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _in_use(folder: Path) -> bool:
    """Whether a process is at work there, perhaps in a container that sees another disk."""
    descriptor = os.open(folder / _USED, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not _locked(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
