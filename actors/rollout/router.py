"""Which engine serves the next request, decided in each rollout actor alone from what the engines announce.

    presence of the engines  --> ready? version, load, limit --+
    presence of the workers  --> my share of each limit -------+--> choose (agents/fleet/choice.py) --> a request goes out
    my own requests          --> work, prefixes, breakers -----+          |
                                                                          `--> no room: wait; who resumes goes first

There is no router process to lose. Waiting is on presence, on the ends of own requests and on breakers, never a poll.
Invariant: whoever waits for an engine is woken when there is one for it, and a session waits for its own at most `patience_s`
while another has room; requests of one kind leave in the order they came.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final

from physarum.actors.policy_engines import READY
from physarum.actors.rollout.fleet import KnownEngine, Ticket
from physarum.actors.rollout.pairing import able, choose_pair, has_mate, has_room
from physarum.agents.errors import EngineRefusedError, NoEngineError
from physarum.agents.fleet.breaker import Breaker, BreakerPolicy
from physarum.agents.fleet.choice import ChoiceRules, Wanted, choose
from physarum.agents.fleet.fair import shares
from physarum.agents.fleet.prefixes import prefix_blocks
from physarum.agents.pairs import PrefillError
from physarum.agents.routing import EngineRef
from physarum.bus.presence import Roster

DEMAND: Final = "demand"
"""The fact in which a worker says how many requests it has for the run's own policy."""
_MEMORY_REQUESTS: Final = 64
"""Over which the typical length of an answer is averaged."""
_Kind = tuple[int | None, int | None]
"""The versions that a request takes: exactly, at least."""
_OVER: Final = ("draining", "finishing", "finished")


class _Waiter:
    """One request that waits for an engine."""

    def __init__(self, wanted: Wanted, deadline_s: float, now: float) -> None:
        self.wanted, self.deadline_s, self.since = wanted, deadline_s, now
        self.blocks = prefix_blocks(wanted.tokens)
        self.kind: _Kind = (wanted.number, wanted.minimum)
        self.given: asyncio.Future[EngineRef] = asyncio.get_running_loop().create_future()


class PresenceRouter:
    """Implements agents.routing.Router over a roster of role "engine" for one group of engines (a model).

    `workers`: the roster of role "rollout", among which `me` shares the engines; None: it is alone.
    """

    def __init__(
        self,
        roster: Roster,
        group: str,
        *,
        workers: Roster | None = None,
        me: str = "",
        rules: ChoiceRules | None = None,
        breaker: BreakerPolicy | None = None,
        front: str | None = None,
        fronts: Roster | None = None,
        exact: bool = True,
        asks: str = DEMAND,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`front`: the URL of an sglang-router, which gets what any of the engines may answer. They are asked directly for
        weights of a certain number, and while the router fails. `fronts`: the roster of role "router", where one that is
        started in this run announces itself. `exact`: of pairs, only tokens of the version that both announced are kept.
        `asks`: the fact in which workers say what they ask of these engines."""
        self._roster, self._group, self._workers, self._me = roster, group, workers, me
        self._rules, self._breaker = rules or ChoiceRules(), breaker or BreakerPolicy()
        self._rng, self._clock = rng or random.Random(), clock
        self._fronts, self._attached, self._exact, self._asks = fronts, front, exact, asks
        self._front, self._front_breaker = front, Breaker(self._breaker, self._rng)
        self._engines: dict[str, KnownEngine] = {}
        self._tickets: dict[int, Ticket] = {}
        self._prefills: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._waiting: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())
        self._kinds: Counter[_Kind] = Counter()
        self._able_at: dict[_Kind, float] = {}
        self._typical: float | None = None
        self._most = 0
        self._probe: asyncio.TimerHandle | None = None
        self.notify()

    @property
    def demand(self) -> int:
        """Requests that are out or wait."""
        return len(self._tickets) + sum(map(len, self._waiting))

    def pop_demand(self) -> int:
        """The most that there was at once since the last call: what this worker asks of the engines."""
        most, self._most = max(self._most, self.demand), self.demand
        return most

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting))

    def notify(self) -> None:
        """To be called at every change of a roster: takes it over, and serves whoever waits."""
        now = self._clock()
        self._note_absence(now)
        self._look_for_front()
        there = [beat for beat in self._roster.members if beat.facts.get("group") == self._group]
        beats = {beat.instance: beat for beat in there if beat.facts.get("role") != "encoder"}
        for name in self._engines.keys() - beats.keys():
            del self._engines[name]
        for name, beat in beats.items():
            known = self._engines.get(name)
            if known is None or known.beat.started_at != beat.started_at:
                self._engines[name] = KnownEngine(beat, self._breaker, self._rng)
            elif known.beat is not beat:
                known.heard(beat)
        self._share()
        self._serve()

    def _look_for_front(self) -> None:
        """The router that is there now; another one begins with a clean record."""
        there = self._fronts.members if self._fronts is not None else []
        ready = [beat for beat in there if beat.state == READY and beat.facts.get("group") == self._group]
        front = str(ready[0].facts["url"]) if ready else self._attached
        if front != self._front:
            self._front, self._front_breaker = front, Breaker(self._breaker, self._rng)

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        """See agents.routing.Router. Raises NoEngineError after `deadline_s` on end without an engine that fits."""
        waiter = _Waiter(wanted, deadline_s, self._clock())
        queue = self._waiting[0 if wanted.resumes else 1]
        queue.append(waiter)
        self._kinds[waiter.kind] += 1
        self._most = max(self._most, self.demand)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(deadline_s, self._overdue, waiter)]
        self._serve()
        if wanted.prefers and not waiter.given.done():
            timers.append(loop.call_later(self._rules.patience_s + 1e-3, self._serve))
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if waiter.given.done() and not waiter.given.cancelled() and waiter.given.exception() is None:
                self.release(waiter.given.result())
            raise
        finally:
            for timer in timers:
                timer.cancel()
            if waiter in queue:
                queue.remove(waiter)
            self._forget(waiter.kind)

    def _forget(self, kind: _Kind) -> None:
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
            self._able_at.pop(kind, None)

    def prefilled(self, ref: EngineRef) -> None:
        ticket = self._prefills.pop(ref.ticket)
        ticket.breaker.succeeded()
        ticket.engine.ended(ticket)
        self._serve()  # it may have been a probe

    def release(self, ref: EngineRef) -> None:
        if (prefill := self._prefills.pop(ref.ticket, None)) is not None:
            prefill.engine.ended(prefill)
        ticket = self._tickets.pop(ref.ticket)
        ticket.engine.ended(ticket)
        self._serve()

    def served(self, ref: EngineRef, made: int) -> None:
        self._typical = made if self._typical is None else self._typical + (made - self._typical) / _MEMORY_REQUESTS
        self._tickets[ref.ticket].breaker.succeeded()

    def failed(self, ref: EngineRef, error: Exception) -> None:
        now = self._clock()
        self._note_absence(now)
        if isinstance(error, PrefillError) and ref.prefill is not None:
            self._prefill_failed(ref, ref.prefill.instance, error, now)
            return
        ticket = self._tickets[ref.ticket]
        if isinstance(error, EngineRefusedError):
            ticket.breaker.succeeded()
        else:
            ticket.engine.failed(ticket, error, now)

    def _prefill_failed(self, ref: EngineRef, instance: str, error: PrefillError, now: float) -> None:
        """One that answered has no ticket any more: it holds other weights than it announced, and its next word counts."""
        ticket, engine = self._prefills.get(ref.ticket), self._engines.get(instance)
        if ticket is not None:
            ticket.engine.failed(ticket, error.cause or error, now)
        elif engine is not None:
            engine.moved()

    def _share(self) -> None:
        """My part of each engine's limit. Who has none anywhere, because there are more workers than places, has one place."""
        limits = {name: one.limit for name, one in self._engines.items() if one.ready and one.limit is not None}
        mine = shares(self._demands(), limits, self._me)
        if limits and not any(mine.values()):
            mine[max(limits, key=lambda name: (limits[name], name))] = 1
        for name, engine in self._engines.items():
            engine.share = mine.get(name)

    def _demands(self) -> dict[str, int]:
        beats = self._workers.members if self._workers is not None else []
        asked = {beat.instance: int(beat.facts.get(self._asks, 0)) for beat in beats if beat.state not in _OVER}
        return {self._me: self.demand} | asked

    def _serve(self) -> None:
        """Sends out who waits and has an engine, in order. One of a kind that finds no room speaks for all of its kind."""
        now = self._clock()
        for queue in self._waiting:
            if queue and any(one.ready and has_room(one, self._engines, now) for one in self._engines.values()):
                self._send_out(queue, now)
        self._wake_for_a_probe(now)

    def _send_out(self, queue: deque[_Waiter], now: float) -> None:
        full: set[_Kind] = set()
        for waiter in self._in_turn(queue, now):
            if (None, None) in full:
                break
            if waiter.given.done() or waiter.kind in full:
                continue
            ref = self._choose(waiter, now)
            if ref is None:
                full.add(waiter.kind)
                continue
            waiter.given.set_result(ref)
            queue.remove(waiter)

    def _in_turn(self, queue: deque[_Waiter], now: float) -> Iterator[_Waiter]:
        """Each in the order they came: whose session's engine has room; who has no session; whose engine has been full for
        `patience_s`.

        So a place that becomes free goes to a session that is at home there: where engines are full, whoever came first would
        take it from them, and prefill its whole history there.
        """
        home, free, away = [], [], []
        for waiter in queue:
            engine = self._engines.get(waiter.wanted.prefers)
            at_home = engine is not None and able(engine, self._engines, waiter.kind, now)
            (home if at_home else free).append(waiter)
        for waiter in home:
            if has_room(self._engines[waiter.wanted.prefers], self._engines, now):
                yield waiter
            elif now - waiter.since >= self._rules.patience_s:
                away.append(waiter)
        yield from free
        yield from away

    def _choose(self, waiter: _Waiter, now: float) -> EngineRef | None:
        open_ = [one for one in self._engines.values() if one.ready and one.breaker.allows(now)]
        taking = [one for one in open_ if one.role == "regular" or has_mate(one, self._engines, now)]
        sizes = [one.capacity for one in taking if one.capacity]
        mean = sum(sizes) / len(sizes) if len(sizes) == len(taking) and sizes else None
        expected = self._expected(waiter.wanted)
        if any(one.role == "prefill" for one in taking):
            return self._send_to_pair(waiter, taking, expected, now)
        views = [
            one.view(waiter.blocks, expected, mean / one.capacity if mean and one.capacity else 1.0, now)
            for one in taking
        ]
        chosen = choose(views, waiter.wanted, self._rules)
        if chosen is None:
            return None
        engine, ticket = self._engines[chosen.instance], next(self._numbers)
        if self._front is not None and waiter.kind == (None, None) and self._front_breaker.allows(now):
            self._tickets[ticket] = engine.send(expected, waiter.blocks, self._front_breaker)
            oldest = min((one for one in self._engines.values() if one.ready), key=lambda one: one.number or 0)
            return EngineRef(self._front, chosen.instance, oldest.version, ticket, through=True)
        self._tickets[ticket] = engine.send(expected, waiter.blocks)
        return EngineRef(engine.beat.facts["url"], chosen.instance, engine.version, ticket)

    def _send_to_pair(
        self, waiter: _Waiter, halves: list[KnownEngine], expected: float, now: float
    ) -> EngineRef | None:
        by_name = {one.beat.instance: one for one in halves}
        chosen = choose_pair(by_name, waiter.wanted, waiter.blocks, expected, self._rules, now)
        if chosen is None:
            return None
        prefill, decode, ticket = chosen.prefill, chosen.decode, next(self._numbers)
        self._prefills[ticket] = prefill.send(len(waiter.wanted.tokens), waiter.blocks)
        self._tickets[ticket] = decode.send(expected, [])
        url, name = decode.beat.facts["url"], decode.beat.instance
        return EngineRef(url, name, decode.version, ticket, prefill=prefill.as_prefill(self._exact))

    def _expected(self, wanted: Wanted) -> float:
        """Tokens that the request will hold and make: its prompt, and an answer as long as others were."""
        answer = wanted.max_new_tokens if self._typical is None else min(self._typical, wanted.max_new_tokens)
        return len(wanted.tokens) + answer

    def _wake_for_a_probe(self, now: float) -> None:
        """Breakers open by the clock: whoever waits meanwhile is served when the first of them may be tried."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        at = [one.breaker.probe_at for one in self._engines.values() if one.ready]
        later = [one for one in at if one is not None and one > now]
        if later and self.waiting:
            self._probe = asyncio.get_running_loop().call_later(min(later) - now, self._serve)

    def _note_absence(self, now: float) -> None:
        """Remembers until when there was an engine for each kind of request that waits; called before anything changes."""
        for kind in self._kinds:
            if self._any_able(kind, now):
                self._able_at[kind] = now

    def _any_able(self, kind: _Kind, now: float) -> bool:
        return any(able(one, self._engines, kind, now) for one in self._engines.values())

    def _overdue(self, waiter: _Waiter) -> None:
        """Its deadline is over, unless there was an engine for it meanwhile."""
        now = self._clock()
        self._note_absence(now)
        left = max(waiter.since, self._able_at.get(waiter.kind, 0.0)) + waiter.deadline_s - now
        if waiter.given.done():
            return
        if left > 1e-3:
            asyncio.get_running_loop().call_later(left, self._overdue, waiter)
            return
        waiter.given.set_exception(self._none(waiter, now))

    def _none(self, waiter: _Waiter, now: float) -> NoEngineError:
        beats = {beat.instance: f"{beat.instance} is {beat.state}" for beat in self._roster.members}
        seen = beats | {name: one.described(now) for name, one in self._engines.items()}
        return NoEngineError(
            f"no engine of group {self._group} was ready{waiter.wanted.versions} within {waiter.deadline_s:g} s"
            f" ({', '.join(seen.values()) or 'none has announced itself'}); see `actorctl ps` and the engines' logs"
        )
