"""Waiting for room on a full disk, in sight of the user: what was accepted is kept until it can be written.

No event tells that a disk has room again, so this looks; it is the only such wait besides the server's expiry.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

NEEDED_BYTES: Final = 16 << 20
"""Below this a disk counts as full: a writer would only stop again at once."""
_LOOK_S: Final = 1.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_WORDS: Final = ("no space left on device", "disk quota exceeded", "os error 28", "os error 122")


def is_full(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that the disk or the quota is full."""
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _FULL) or says_full(str(seen)):
            return True
        seen = seen.__cause__
    return False


def says_full(text: str) -> bool:
    """The same of a message that came from another program or language."""
    return any(words in text.lower() for words in _WORDS)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


async def until_room(folder: Path, what: str, stop: asyncio.Event) -> bool:
    """Waits until the disk of `folder` has room; False when `stop` was set first. Says so once, and when it goes on."""
    _log.error(
        "%s cannot be written: the disk of %s is full (%d MiB free, at least %d needed). Nothing is lost: it waits, and goes"
        " on by itself once space is freed there",
        *(what, folder, free_bytes(folder) >> 20, NEEDED_BYTES >> 20),
    )
    while not stop.is_set():
        if free_bytes(folder) >= NEEDED_BYTES:
            _log.warning("the disk of %s has room again: going on with %s", folder, what)
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()
    return False
