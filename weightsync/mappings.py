"""Files as memory, mapped once: a file of the area that is used for one version after another keeps its mapping.

To map a gibibyte anew costs as much as to read it twice, page by page. A mapping holds no lock on its file, so it does not say
that nobody overwrites it; HeldFile does. Files that were deleted are let go at the next call.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Final

_KEPT: Final = 6
_Key = tuple[int, int, bool]


class _Mapping:
    """A file of its own, mapped as a whole."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(descriptor, 0, prot=protection)
        self._own = os.dup(descriptor)

    @property
    def deleted(self) -> bool:
        return os.fstat(self._own).st_nlink == 0

    def __del__(self) -> None:
        os.close(self._own)


_kept: dict[_Key, _Mapping] = {}
_guard = threading.Lock()


def memory_of(descriptor: int, writable: bool = False) -> mmap.mmap:
    """All of the open file, which must not be empty. The mapping may be longer than the file, if that was longer before."""
    state = os.fstat(descriptor)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if state.st_nlink == 0:
        return mmap.mmap(descriptor, 0, prot=protection)
    key = (state.st_dev, state.st_ino, writable)
    forget_deleted()
    with _guard:
        found = _kept.pop(key, None)
        if found is None or len(found.memory) < state.st_size:
            found = _mapped(descriptor, writable)
        _kept[key] = found
        for oldest in list(_kept)[:-_KEPT]:
            del _kept[oldest]
        return found.memory


def forget_deleted() -> None:
    """Lets go of files that have no name any more, and so of their room."""
    with _guard:
        for one in [one for one, mapping in _kept.items() if mapping.deleted]:
            del _kept[one]


def _mapped(descriptor: int, writable: bool) -> _Mapping:
    """Opened anew: a mapping of a locked descriptor would keep the lock."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR if writable else os.O_RDONLY)
    try:
        return _Mapping(own, writable)
    finally:
        os.close(own)
