"""Which engine gets a request. The router owns that knowledge; a client only asks, returns and reports.

Invariant: every engine that `pick` hands out is given back with exactly one `release`; `served` or `failed`, if any, come
before.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from physarum.agents.fleet.choice import Wanted
from physarum.agents.pairs import Prefill


class EngineRef(msgspec.Struct, frozen=True):
    """An engine as known when it was picked: base URL, actor instance and the version label it serves.

    `ticket`: the router's own mark of the request. `through`: the URL is that of an sglang-router, which sends it to whichever
    engine it likes; `version` is then the oldest that one of them serves. `prefill`: the engine decodes only, and this one, of
    the same version, prefills for it.
    """

    url: str
    instance: str
    version: str
    ticket: int = 0
    through: bool = False
    prefill: Prefill | None = None

    @property
    def home(self) -> str:
        """The instance that holds the session's prefix."""
        return self.instance if self.prefill is None else self.prefill.instance


class Router(Protocol):
    """Chooses among live engines; waits on its own events (presence, heads, ends of requests), never by polling."""

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        """An engine that takes this request now; where all that fit are saturated, it waits for room.

        Raises NoEngineError when for `deadline_s` on end there was none that could ever take it.
        """
        ...

    def release(self, ref: EngineRef) -> None:
        """The request on `ref` is over, however it ended."""
        ...

    def served(self, ref: EngineRef, made: int) -> None:
        """The engine answered, with `made` tokens."""
        ...

    def failed(self, ref: EngineRef, error: Exception) -> None:
        """A request on `ref` failed, perhaps by the engine's fault: connection, timeout, 5xx, no reply. A refusal (4xx) is
        an answer all the same; a PrefillError is of the prefill server alone."""
        ...

    def prefilled(self, ref: EngineRef) -> None:
        """The prefill server of `ref` has answered: its place is free."""
        ...
