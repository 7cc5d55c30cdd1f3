"""The differences that a service has computed: each once, whoever asks and however many, as many as fit in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

_KEPT_BYTES: Final = 256 << 20
_KEY_BYTES: Final = 256
_THREADS: Final = 2
"""They compute beside whatever else the service does."""

Key = tuple[str, str, int]
"""The chunk's digest, its base's, bytes of an element."""


class Differences:
    """From any thread. What was asked for last stays; `None` (not worth it) is remembered, too. A failure is not."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._found: OrderedDict[Key, Future[bytes | None]] = OrderedDict()
        self._costs: dict[Key, int] = {}
        """Of those in `_found` that are done and accounted."""
        self._guard = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="differences")

    def get(self, key: Key, compute: Callable[[], bytes | None]) -> bytes | None:
        """What `compute` returns, or returned before; who asks meanwhile waits for it. Raises what it raises."""
        with self._guard:
            future = self._found.get(key)
            new = future is None
            if future is None:
                future = self._found[key] = self._pool.submit(compute)
            self._found.move_to_end(key)
        if new:
            future.add_done_callback(lambda done: self._account(key, done))
        return future.result()

    def close(self) -> None:
        """Computes nothing any more."""
        self._pool.shutdown(cancel_futures=True)

    def _account(self, key: Key, done: Future[bytes | None]) -> None:
        """Only what was accounted is dropped: who is still computed, or just done, comes here itself."""
        with self._guard:
            if done.cancelled() or done.exception() is not None:
                del self._found[key]
                return
            self._costs[key] = _cost(done.result())
            self._bytes += self._costs[key]
            for one in [*self._dropped(key)]:
                del self._found[one]

    def _dropped(self, newest: Key) -> Iterator[Key]:
        """What has to go, the one that was asked for longest ago first; the newest stays, whatever its size."""
        for one in self._found:
            if self._bytes <= self._kept_bytes:
                return
            if one != newest and one in self._costs:
                self._bytes -= self._costs.pop(one)
                yield one


def _cost(data: bytes | None) -> int:
    """Also of one that is empty: keys take memory."""
    return len(data or b"") + _KEY_BYTES
