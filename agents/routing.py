"""Which engine gets a request. The router owns that knowledge; a client only asks, returns and reports.

Invariant: every engine that `pick` hands out is given back with exactly one `release`; `failed`, if any, comes before.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class EngineRef(msgspec.Struct, frozen=True):
    """An engine as known when it was picked: base URL, actor instance and the version label it serves."""

    url: str
    instance: str
    version: str


class Router(Protocol):
    """Chooses among live engines; waits on its own events (presence, heads), never by polling."""

    async def pick(self, deadline_s: float, number: int | None = None) -> EngineRef:
        """An engine that may take one more request; with `number`, one that serves the weights of that number.

        Raises NoEngineError when `deadline_s` passes without one.
        """
        ...

    def release(self, ref: EngineRef) -> None:
        """The request on `ref` is over, however it ended."""
        ...

    def failed(self, ref: EngineRef, error: Exception) -> None:
        """A request on `ref` failed for a reason that may be the engine's: connection, timeout or 5xx."""
        ...
