"""Files in shared memory that a CUDA device copies to and from directly: mapped and page-locked once, used again and again.

Files on a disk are not asked for: the kernel page-locks none of them, and a call of CUDA that failed makes a later one fail in
its place. Page-locking costs as much as many copies, and the files of an area change hands and stay: so a file keeps its
mapping here for as long as it exists. Memory that is unmapped without being unlocked stays locked at its address, and what is
mapped there next cannot be: `PinnedFiles` that nobody holds any more unlock theirs. Stands alone: torch, the standard library.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

import torch
from torch import Tensor

_KEPT = 4


class PinnedFiles:
    """The files of one process. Not for several threads at the same time."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _Pinned] = {}

    def memory(self, descriptor: int) -> Tensor | None:
        """All of the open file as bytes; None where it cannot be page-locked: copy through memory that can."""
        state = os.fstat(descriptor)
        if not _in_memory(state):
            return None
        key = (state.st_dev, state.st_ino)
        for gone in [name for name, file in self._files.items() if file.deleted]:
            self._files.pop(gone).close()
        found = self._files.pop(key, None)
        if found is not None and found.size < state.st_size:
            found.close()
            found = None
        if found is None:
            found = _Pinned.of(descriptor, state.st_size)
        if found is None:
            return None
        self._files[key] = found
        while len(self._files) > _KEPT:
            self._files.pop(next(iter(self._files))).close()
        return found.bytes[: state.st_size]


def _in_memory(state: os.stat_result) -> bool:
    try:
        return state.st_dev == os.stat("/dev/shm").st_dev
    except OSError:
        return False


class _Pinned:
    """A file of its own, mapped and locked as a whole, until `close` or until nobody holds it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._own = descriptor
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        address = self.bytes.data_ptr()
        self.locked = int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0
        # The process's end needs none of it. Runs before the mapping, which `bytes` holds, is gone.
        self.close = weakref.finalize(self, _release, descriptor, address if self.locked else None)
        self.close.atexit = False

    @classmethod
    def of(cls, descriptor: int, size: int) -> _Pinned | None:
        """Opened anew: the lock on the caller's descriptor stays the caller's, and both directions are allowed."""
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        except OSError:
            return None
        made = cls(own, size)
        if made.locked:
            return made
        made.close()
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error upon itself: the next call of whoever copies must not
        return None

    @property
    def deleted(self) -> bool:
        return os.fstat(self._own).st_nlink == 0


def _release(descriptor: int, address: int | None) -> None:
    """Waits for the device: copies may be under way."""
    if address is not None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
    os.close(descriptor)
