"""One supervisor per run: an flock on `supervisor.lock`, whose text names the holder.

The lock is the kernel's, so it ends with the process however that ends. Readers never touch the lock (a probe could
refuse a supervisor that is just starting); they check the named process instead.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from physarum.actors.supervisor.errors import RunHeldError
from physarum.bus.process_clock import is_alive, started_s


class Holder(msgspec.Struct, frozen=True):
    """The supervisor's process. `started_at` (seconds from boot) guards against a reused pid, whatever the clock does."""

    pid: int
    started_at: float


def lock_path(folder: Path) -> Path:
    return folder / "supervisor.lock"


def holder(folder: Path) -> Holder | None:
    """The live supervisor of a run folder, if any."""
    try:
        found = msgspec.json.decode(lock_path(folder).read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found if is_alive(found.pid, found.started_at) else None


def held_message(folder: Path) -> str:
    """For the user who started a second supervisor."""
    found = holder(folder)
    by = f"process {found.pid}" if found is not None else "another process"
    return (
        f"run {folder.name} already has a supervisor: {by}. Look at it with `actorctl ps {folder.name}`, stop it with"
        f" `actorctl down {folder.name}`, or start another run with `run.name=NAME`"
    )


class RunLock:
    """Held for the length of a `with` block. Raises RunHeldError, naming the holder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle = -1

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock_path(self._folder), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise RunHeldError(held_message(self._folder)) from error
        me = Holder(os.getpid(), started_s(os.getpid()) or 0.0)
        os.ftruncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(me), 0)
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
