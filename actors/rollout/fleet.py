"""The engines as one rollout actor knows them: what they announced, and what this process itself has there.

Invariant: `requests` and `tokens` of an engine are those of the tickets that are out, whatever the engine announces, and an
actor that started anew under the same name begins with a clean record.
"""

from __future__ import annotations

import random
from typing import Final
from urllib.parse import urlsplit

import msgspec

from physarum.actors.engine.load import Announced
from physarum.actors.policy_engines import READY
from physarum.agents.fleet.breaker import Breaker, BreakerPolicy, fault_of
from physarum.agents.fleet.choice import EngineView, takes
from physarum.agents.fleet.prefixes import KnownPrefixes
from physarum.agents.pairs import Prefill
from physarum.bus.errors import RecordError
from physarum.bus.presence import Heartbeat
from physarum.bus.version import Version

_UNKNOWN_CAPACITY: Final = 1 << 20
"""Tokens of a KV pool that is not reported: only how many prefixes are remembered rests on it."""


class Ticket(msgspec.Struct, frozen=True):
    """One request on an engine; `tokens`: what it is expected to hold and make; `probe`: `breaker` waits for its end.

    `breaker`: of the engine, or of the router through which the request went.
    """

    engine: KnownEngine
    tokens: float
    breaker: Breaker
    probe: bool


class KnownEngine:
    """One incarnation of an engine actor."""

    def __init__(self, beat: Heartbeat, breaker: BreakerPolicy, rng: random.Random) -> None:
        self.breaker = Breaker(breaker, rng)
        self.requests, self.tokens = 0, 0.0
        self.share: int | None = None
        self._tie = rng.random()
        self._prefixes = KnownPrefixes(_UNKNOWN_CAPACITY)
        self._stale: int | None = None
        self.heard(beat)

    def heard(self, beat: Heartbeat) -> None:
        """A heartbeat; what others have there is what it announced beyond what we had when it came."""
        self.beat = beat
        self.load = msgspec.convert(beat.facts["load"], Announced) if "load" in beat.facts else None
        self._others = max(0, self.load.there - self.requests) if self.load is not None else 0
        self.version = str(beat.facts.get("version", ""))
        self.number = _number(self.version)
        self._prefixes.serve(self.version, self.capacity or _UNKNOWN_CAPACITY)

    @property
    def capacity(self) -> int | None:
        return None if self.load is None else self.load.capacity

    @property
    def limit(self) -> int | None:
        return None if self.load is None else self.load.limit

    @property
    def role(self) -> str:
        """`regular`, `prefill` or `decode`."""
        return str(self.beat.facts.get("role", "regular"))

    def prefills_for(self, other: KnownEngine) -> bool:
        """Whether both hold the same weights, so that KV of the one is KV for the other."""
        return self.role == "prefill" and other.role == "decode" and self.version == other.version

    @property
    def ready(self) -> bool:
        """By its own word, of now: after it was found with other weights than announced, its next word counts."""
        return self.beat.state == READY and self._stale != self.beat.sequence and "url" in self.beat.facts

    def able(self, kind: tuple[int | None, int | None], now: float) -> bool:
        """Whether it could take a request for weights (exactly, at least), now or when there is room."""
        return self.ready and takes(self.number, *kind) and self.breaker.state(now) != "open"

    @property
    def has_room(self) -> bool:
        return self.share is None or self.requests < self.share

    def view(self, blocks: list[int], typical: float, scale: float, now: float) -> EngineView:
        """As `choose` wants it. `typical`: tokens of a request of others; `scale`: mean capacity over its own."""
        room = 1 << 30 if self.share is None else self.share - self.requests
        return EngineView(
            instance=self.beat.instance,
            number=self.number,
            room=min(room, 1) if self.breaker.state(now) != "closed" else room,
            work=(self.tokens + self._others * typical) * scale,
            cached=self._prefixes.shared(blocks),
            tie=self._tie,
        )

    def send(self, tokens: float, blocks: list[int], through: Breaker | None = None) -> Ticket:
        """A request goes out. `through`: the breaker of the router that it goes to instead."""
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        self._prefixes.add(blocks)
        breaker = self.breaker if through is None else through
        return Ticket(self, tokens, breaker, breaker.sent())

    def ended(self, ticket: Ticket) -> None:
        self.requests -= 1
        self.tokens = self.tokens - ticket.tokens if self.requests else 0.0
        if ticket.probe:
            ticket.breaker.given_up()

    def failed(self, ticket: Ticket, error: Exception, now: float) -> None:
        """A failure that says nothing of the connection means other weights than announced: its next word is waited for. One
        that has said it takes no requests gives back what it has: SGLang answers 500 to what it aborts while KV travels."""
        fault = fault_of(error)
        if fault == "server" and self.beat.state != READY:
            return
        if fault is None:
            self.moved()
        else:
            ticket.breaker.failed(fault, now, ticket.probe)

    def moved(self) -> None:
        """It was found with other weights than it announced."""
        self._stale = self.beat.sequence

    def as_prefill(self, exact: bool) -> Prefill:
        """What a client must know of it as the first half of a pair."""
        facts = self.beat.facts
        host = urlsplit(facts["url"]).hostname or ""
        return Prefill(
            url=facts["url"], instance=self.beat.instance, host=host, port=int(facts["bootstrap_port"]), exact=exact
        )

    def described(self, now: float) -> str:
        """For messages."""
        state = self.breaker.state(now)
        tripped = "" if state == "closed" else f" (its breaker is {state.replace('_', ' ')})"
        half = "" if self.role == "regular" else f" ({self.role}, {self.version or 'no version yet'})"
        return f"{self.beat.instance}{half} is {self.beat.state}{tripped}"


def _number(label: str) -> int | None:
    """Of the weights; None: an engine that follows no versions."""
    try:
        return Version.parse(label).number
    except RecordError:
        return None
