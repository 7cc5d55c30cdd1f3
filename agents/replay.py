"""How many tokens were prefilled a second time because something interrupted their generation, by what interrupted it.

An interruption finds a context in an engine's KV cache: the prompt and the tokens made so far. It is *interrupted*; what of it
has to be computed again before the next token can be made is *replayed*. Both come from SGLang's own report of a reply
(cached_tokens, weight_versions, num_retractions). What is replayed, by the kind of interruption:

    aborted       cut off, and gone on with on the same engine      prompt of the next request - its cached_tokens
    moved         cut off (a drain), and gone on with on another    the same
    lost          no answer (a death, a timeout, 5xx), sent again   the same
    handed_over   another worker goes on with the task              the same
    in_place      weights changed, KV kept                          0
    retracted     weights changed, KV recomputed                    the whole context, once for each update
    squeezed      put back more often than updates say (no KV)      at most the whole reply: where it was is not said

What a lost engine had made and not yet sent is made anew, and counted nowhere: nobody knows how much it was. What it had sent
(agents/streaming.py) is of the context of the request that goes on; which updates those tokens lived through is not known.
A request that never reached an engine (connection refused), or that was cut off before its first token, interrupted nothing.
The last token of a prompt is computed whatever is cached, so one replayed token for each continuation is the least there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from physarum.bus.version import Span

Kind = Literal["aborted", "moved", "lost", "handed_over", "in_place", "retracted", "squeezed"]


class Tokens(msgspec.Struct):
    """`times`: interruptions; `interrupted`, `replayed`: tokens."""

    times: int = 0
    interrupted: int = 0
    replayed: int = 0

    def add(self, times: int, interrupted: int, replayed: int) -> None:
        self.times += times
        self.interrupted += interrupted
        self.replayed += replayed


class Replay:
    """Of one process."""

    def __init__(self) -> None:
        self._now: dict[Kind, Tokens] = {}

    def continued(self, kind: Kind, context: int, cached: int) -> None:
        """A request with `context` tokens of which `cached` were still there goes on where one was interrupted."""
        self._add(kind, 1, context, max(0, context - cached))

    def answered(self, prompt: int, spans: Sequence[Span], retractions: int) -> None:
        """A reply: each border between its spans is an update that it lived through."""
        contexts = [prompt + span.start for span in spans[1:]]
        retracted = len(contexts) if retractions >= len(contexts) else 0
        if contexts:
            kind: Kind = "retracted" if retracted else "in_place"
            self._add(kind, len(contexts), sum(contexts), sum(contexts) if retracted else 0)
        if (squeezed := retractions - retracted) > 0:
            whole = squeezed * (prompt + (spans[-1].end if spans else 0))
            self._add("squeezed", squeezed, whole, whole)

    def pop(self) -> dict[Kind, Tokens]:
        """What came since the last call; kinds that did not are left out."""
        found, self._now = self._now, {}
        return found

    def _add(self, kind: Kind, times: int, interrupted: int, replayed: int) -> None:
        self._now.setdefault(kind, Tokens()).add(times, interrupted, replayed)
