"""Files that are whole or absent: written aside, optionally forced to disk, then renamed into place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from physarum.weightsync.digest import Bytes

ASIDE_PREFIX: Final = ".aside-"


def write_whole(file: Path, parts: Iterable[Bytes], fsync: bool) -> None:
    """`file` holds all `parts` or what it held before, whatever happens meanwhile. Its folder must exist."""
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=ASIDE_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.writelines(parts)
            out.flush()
            if fsync:
                os.fsync(out.fileno())
        os.replace(aside, file)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    if fsync:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and deletions in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_asides(folder: Path) -> int:
    """Deletes what an interrupted writer left in `folder`; how many files. Only for the folder's sole owner."""
    found = list(folder.glob(f"{ASIDE_PREFIX}*"))
    for file in found:
        file.unlink(missing_ok=True)
    return len(found)
