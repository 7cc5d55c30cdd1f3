"""Prefill and decode servers of a group as halves of pairs.

Invariant: the halves of a pair announced the same weights, and both take requests; a prefill server is chosen as an engine is,
by session, prefix and work, since it holds the prefixes, and for it the lightest decode server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from physarum.actors.rollout.fleet import KnownEngine
from physarum.agents.fleet.choice import ChoiceRules, Wanted, choose


class Chosen(NamedTuple):
    """A pair."""

    prefill: KnownEngine
    decode: KnownEngine


def mates(engine: KnownEngine, engines: Mapping[str, KnownEngine]) -> Iterable[KnownEngine]:
    """The other halves that hold its weights."""
    return (one for one in engines.values() if engine.prefills_for(one) or one.prefills_for(engine))


def has_room(engine: KnownEngine, engines: Mapping[str, KnownEngine], now: float) -> bool:
    """Whether it has room, and where it is half a pair a mate that takes a request now."""
    return engine.has_room and (engine.role == "regular" or has_mate(engine, engines, now))


def has_mate(engine: KnownEngine, engines: Mapping[str, KnownEngine], now: float) -> bool:
    return any(one.ready and one.has_room and one.breaker.allows(now) for one in mates(engine, engines))


def able(
    engine: KnownEngine, engines: Mapping[str, KnownEngine], kind: tuple[int | None, int | None], now: float
) -> bool:
    """Whether it could take a request for weights (exactly, at least), now or when there is room. Requests go to decode servers
    only behind prefill servers."""
    if engine.role == "decode" or not engine.able(kind, now):
        return False
    return engine.role == "regular" or any(one.able(kind, now) for one in mates(engine, engines))


def choose_pair(
    halves: Mapping[str, KnownEngine],
    wanted: Wanted,
    blocks: list[int],
    expected: float,
    rules: ChoiceRules,
    now: float,
) -> Chosen | None:
    """Of those that take a request now. `expected`: tokens that it will hold and make; `blocks`: of its prompt."""
    length = len(wanted.tokens)
    views = [one.view(blocks, length, 1.0, now) for one in halves.values() if one.role == "prefill"]
    first = choose(views, wanted, rules)
    if first is None:
        return None
    prefill = halves[first.instance]
    anywhere = msgspec.structs.replace(wanted, prefers="")
    second = choose([one.view([], expected, 1.0, now) for one in mates(prefill, halves)], anywhere, rules)
    return None if second is None else Chosen(prefill, halves[second.instance])
