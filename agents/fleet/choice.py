"""Which of several engines gets a request: a pure decision over one snapshot.

    version fits, takes requests --> has room for us --> not much busier than the lightest --> the session's own engine,
                                                                                               else the longest shared prefix,
                                                                                               else the least work

Invariant: a preference (session, prefix) never costs more waiting than `ChoiceRules` says: whoever is saturated or too far
behind the lightest engine is escaped from. That is the rule of a cache-aware router with a balance bound (sglang-router's
`cache_aware`), by tokens instead of requests, since answers differ in length by a factor of a hundred.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt


def takes(number: int | None, exact: int | None, minimum: int | None) -> bool:
    """Whether weights `number` (None: of an engine that follows no versions) are those asked for."""
    if number is None:
        return exact is None and minimum is None
    return (exact is None or number == exact) and (minimum is None or number >= minimum)


class Wanted(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a request asks of its engine.

    `tokens` int32 [P], the prompt; `number`: weights of exactly this number; `minimum`: of at least this one; `prefers`: the
    instance that served the session last; `resumes`: it goes on behind tokens that are held, so it goes before others.
    """

    tokens: npt.NDArray[np.int32]
    max_new_tokens: int
    number: int | None = None
    minimum: int | None = None
    prefers: str = ""
    resumes: bool = False

    def takes(self, number: int | None) -> bool:
        """Whether weights `number` will do."""
        return takes(number, self.number, self.minimum)

    @property
    def versions(self) -> str:
        """The constraint in words, for messages; "" for none."""
        exact = "" if self.number is None else f" and served weights {self.number}"
        return exact + ("" if self.minimum is None else f" and served weights {self.minimum} or newer")


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as this process sees it. Only engines that take requests (ready, breaker not open) are viewed.

    `room`: requests that we may still send it; `work`: tokens that it has before it, in the measure of an engine of mean size;
    `cached`: leading tokens of the prompt that it probably holds; `tie`: decides among equals, another in each process.
    """

    instance: str
    number: int | None
    room: int
    work: float
    cached: int = 0
    tie: float = 0.0


class ChoiceRules(msgspec.Struct, frozen=True, kw_only=True):
    """An engine is near the lightest one while work <= lightest * `imbalance` + `slack_tokens`."""

    imbalance: float = 1.25
    slack_tokens: int = 8192
    prefix_share: float = 0.5
    """Of the prompt that must be shared for a prefix to decide."""
    patience_s: float = 2.0
    """How long a session waits for room on its own engine while another one has some."""


def choose(engines: Iterable[EngineView], wanted: Wanted, rules: ChoiceRules) -> EngineView | None:
    """The engine for `wanted`; None where none that fits has room."""
    able = [engine for engine in engines if engine.room > 0 and wanted.takes(engine.number)]
    if not able:
        return None
    lightest = min(able, key=lambda engine: (engine.work, engine.tie))
    bound = lightest.work * rules.imbalance + rules.slack_tokens
    near = [engine for engine in able if engine.work <= bound]
    for engine in near:
        if engine.instance == wanted.prefers:
            return engine
    longest = max(near, key=lambda engine: (engine.cached, -engine.work, -engine.tie))
    if longest.cached and longest.cached >= rules.prefix_share * len(wanted.tokens):
        return longest
    return lightest
