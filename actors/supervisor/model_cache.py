"""Models that were made here, by the digest of everything that decides their bytes.

    <cache>/models/<digest>/model/      the Hugging Face folder
    <cache>/models/<digest>/made.json   what made it and how long that took
    <cache>/models/<digest>.lock        held (flock) while it is being made

Invariant: an entry is whole or absent (it is made aside and renamed), and one process makes it while others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from physarum.actors.supervisor.run_folder import write_atomic

T = TypeVar("T")


class Made(msgspec.Struct, frozen=True):
    """`made.json`. `seconds`: wall time of the making."""

    origin: str
    seconds: float


class CacheEntry(msgspec.Struct, frozen=True):
    """A model in the cache; `cached` is False when it was made just now."""

    folder: Path
    seconds: float
    cached: bool


def cache_root() -> Path:
    """PHYSARUM_CACHE, or ~/.cache/physarum."""
    return Path(os.environ.get("PHYSARUM_CACHE", "~/.cache/physarum")).expanduser().absolute() / "models"


async def cached(
    digest: str, origin: str, make: Callable[[Path], Awaitable[None]], say: Callable[[str], None]
) -> CacheEntry:
    """The entry of `digest`; when there is none, `make` fills an empty folder with it. Raises what `make` raises."""
    if (found := _find(digest)) is not None:
        return found
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    async with _locked(root / f"{digest}.lock", lambda: say(f"another process is making {origin}; waiting for it")):
        if (found := _find(digest)) is not None:
            return found
        await asyncio.to_thread(_clear, root, digest)
        aside = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=root))
        try:
            started = time.monotonic()
            (aside / "model").mkdir()
            await make(aside / "model")
            made = Made(origin, round(time.monotonic() - started, 3))
            write_atomic(aside / "made.json", msgspec.json.encode(made))
            os.rename(aside, root / digest)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return CacheEntry(root / digest / "model", made.seconds, cached=False)


def _clear(root: Path, digest: str) -> None:
    """What processes that were killed left of it; whoever calls holds its lock. A model may fill a disk in a few tries."""
    for left in root.glob(f".{digest}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _find(digest: str) -> CacheEntry | None:
    entry = cache_root() / digest
    try:
        made = msgspec.json.decode((entry / "made.json").read_bytes(), type=Made)
    except FileNotFoundError:
        return None
    return CacheEntry(entry / "model", made.seconds, cached=True)


@contextlib.asynccontextmanager
async def _locked(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            # The thread waits on a handle of its own: ours may be closed (the user stopped) while it waits.
            waiting = os.dup(handle)
            await in_daemon_thread(lambda: _lock_and_close(waiting))
        yield
    finally:
        os.close(handle)


def _lock_and_close(handle: int) -> None:
    """An flock belongs to the open file, which a duplicated handle shares: closing the duplicate keeps it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread for work that cannot be cancelled: when the caller is, the process can still end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def deliver(action: Callable[[], None]) -> None:
        if not answer.done():
            action()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
            caught = error
            report = functools.partial(deliver, lambda: answer.set_exception(caught))
        else:
            report = functools.partial(deliver, lambda: answer.set_result(result))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(report)

    threading.Thread(target=run, daemon=True, name="waiting").start()
    return await answer
