"""Files in shared memory that a CUDA device copies to and from directly: mapped and page-locked once, used again and again.

Files on a disk are not asked for: the kernel page-locks none of them, and a call of CUDA that failed makes a later one fail in
its place. Page-locking costs as much as many copies, and the files of an area change hands and stay: so a file keeps its
mapping here for as long as it exists. Stands alone: torch and the standard library.
"""

from __future__ import annotations

import contextlib
import mmap
import os

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
    """A file of its own, mapped and locked as a whole."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._own = descriptor
        self._map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._locked = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0

    @classmethod
    def of(cls, descriptor: int, size: int) -> _Pinned | None:
        """Opened anew: the lock on the caller's descriptor stays the caller's, and both directions are allowed."""
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        except OSError:
            return None
        made = cls(own, size)
        if made._locked:
            return made
        made.close()
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error upon itself: the next call of whoever copies must not
        return None

    @property
    def deleted(self) -> bool:
        return os.fstat(self._own).st_nlink == 0

    def close(self) -> None:
        if self._locked:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._map.close()
        os.close(self._own)
