"""Removing blobs while other processes store and read them, without a lock that a paused process could hold.

    list (what is there, how young) ... somebody decides ... remove (only what is exactly as old as it was then)

A blob is taken aside first, then looked at: one that was stored again in between is put back. Invariant: a blob that was
confirmed or stored after the list was made is never lost, whenever this process or another one dies: it is under its name
or aside, and readers look in both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from physarum.bus.blobs import ASIDE_PREFIX, SWEPT, BlobStore, fsync_folder, is_digest
from physarum.bus.errors import RecordError

_ASIDE: Final = re.compile(rf"[0-9a-f]{{2}}/{re.escape(ASIDE_PREFIX)}[A-Za-z0-9_]+")
_SHARD: Final = "[0-9a-f][0-9a-f]"


def listing(store: BlobStore) -> dict[str, int]:
    """What is in the store: blobs by digest, writers' asides by path; each with its modification time in ns. Blocking."""
    restore(store)
    found: dict[str, int] = {}
    for file in store.folder.glob(f"{_SHARD}/*"):
        name = file.name if is_digest(file.name) else f"{file.parent.name}/{file.name}"
        if is_digest(name) or _ASIDE.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                found[name] = file.stat().st_mtime_ns
    return found


def remove(store: BlobStore, listed: Mapping[str, int]) -> int:
    """Removes what is as it was listed; the bytes freed. Raises RecordError for a name that no listing gives. Blocking."""
    strange = next((name for name in listed if not is_digest(name) and not _ASIDE.fullmatch(name)), None)
    if strange is not None:
        raise RecordError(f"{strange[:80]!r} is neither a blob's digest nor a writer's aside")
    (store.folder / SWEPT).mkdir(parents=True, exist_ok=True)
    freed = 0
    for name, listed_ns in listed.items():
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else
            freed += _remove(store, name, listed_ns)
    return freed


def restore(store: BlobStore) -> None:
    """Puts back what a removal that was killed left aside; it is listed again, and decided about again. Blocking."""
    for taken in (store.folder / SWEPT).glob("*"):
        if is_digest(taken.name):
            _put_back(store, taken)


def _remove(store: BlobStore, name: str, listed_ns: int) -> int:
    path = store.path(name) if is_digest(name) else store.folder / name
    state = path.stat()
    if state.st_mtime_ns != listed_ns:
        return 0
    if not is_digest(name):
        path.unlink()  # an aside has one writer, and it has not written since it was listed
        return state.st_size
    taken = store.folder / SWEPT / name
    os.rename(path, taken)
    if taken.stat().st_mtime_ns != listed_ns:
        _put_back(store, taken)
        return 0
    taken.unlink()
    return state.st_size


def _put_back(store: BlobStore, taken: Path) -> None:
    path = store.path(taken.name)
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # stored anew, or put back by somebody else
        os.link(taken, path)
        fsync_folder(path.parent)
    taken.unlink(missing_ok=True)
