"""An episode's own clock: it runs while the agent, its tools and engines work for it, and stands still while it is held up.

Held up is a request that waits for an engine (none is ready, all are saturated, a failed one is backed off from). Where an
episode has several requests at once, the clock runs as long as one of them is with an engine.

Invariant: the limit is on the time the clock has run. What an episode waits for is bounded by its requests' own deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator


class EpisodeClock:
    """Of one episode, in one event loop. Without `limit` around the episode it only counts."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._left_s = 0.0
        self._held, self._working = 0, 0
        self._stands = False
        self.ran_out = False
        """Whether the limit was reached; a TimeoutError of another origin leaves it as it is."""

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError when the clock has run for `seconds` inside the block."""
        async with asyncio.timeout(seconds) as timeout:
            self._timeout = timeout
            try:
                yield
            finally:
                self.ran_out, self._timeout = timeout.expired(), None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The body waits for an engine."""
        self._held += 1
        self._move()
        try:
            yield
        finally:
            self._held -= 1
            self._move()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The body waits for an engine's answer."""
        self._working += 1
        self._move()
        try:
            yield
        finally:
            self._working -= 1
            self._move()

    def _move(self) -> None:
        """Stops or starts, if that is due and there still is a limit to move."""
        stands = self._held > 0 and self._working == 0
        timeout = self._timeout
        if timeout is None or timeout.expired() or stands == self._stands:
            return
        now = asyncio.get_running_loop().time()
        if stands:
            end = timeout.when()
            assert end is not None
            self._left_s = max(0.0, end - now)
            timeout.reschedule(None)
        else:
            timeout.reschedule(now + self._left_s)
        self._stands = stands
