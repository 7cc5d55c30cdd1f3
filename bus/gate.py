"""Who tries a full stream again: one prober; all others wait for its success, in the order in which they came.

Without it whoever comes last wins: its first attempt is at once, while those that waited longest back off longest. The
sibling that a whole group waits for could then be the one that is never stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Turn:
    """One publisher's way through a gate."""


class Gate:
    """Of one stream, for the publishes of one process."""

    def __init__(self) -> None:
        self._prober: Turn | None = None
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """However it ends, others may try: it was stored, or somebody else must find out whether there is room."""
        turn = Turn()
        try:
            yield turn
        finally:
            if self._prober is turn:
                self._prober = None
                self._open.set()

    async def wait(self, turn: Turn) -> None:
        """Returns when `turn` may try."""
        while self._prober not in (None, turn):
            await self._open.wait()

    def full(self, turn: Turn) -> bool:
        """`turn` found the stream full; whether it is the one that tries again after a while."""
        if self._prober is None:
            self._prober = turn
            self._open.clear()
        return self._prober is turn
