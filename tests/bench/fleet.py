"""A fleet under agentic work of a long tail: how busy it is, what it preempts, what it prefills twice.

Four rollout actors' routers (the product's) over eight engines of the queueing model (tests/queueing_engine.py), in virtual
time. An episode has 1 to 8 turns; each turn sends its whole history again, of which an engine prefills only what it does not
hold from the turn before, answers with lognormal lengths (p99 / mean = 7.3), and waits for its tool. Loads are announced
every second. Every worker has more episodes than the engines take.

    ours             limits by AIMD, shared; sessions and prefixes followed near the lightest engine
    fewest requests  the engine with the fewest own requests, no limit: what is not run waits inside the engine
    fixed N          as ours, with the same limit of N at each engine: the best N is known only afterwards
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from physarum.actors.engine.limit import Limit, LimitRules
from physarum.actors.rollout.router import PresenceRouter
from physarum.agents.fleet.choice import Wanted
from physarum.agents.routing import EngineRef
from physarum.bus.presence import Heartbeat
from tests.queueing_engine import Engine, Request

ENGINES: Final = 8
WORKERS: Final = 4
TICK_S: Final = 0.5
LONGEST: Final = 16_000
_MOST_TURNS: Final = 8


class Present:
    """A roster in this process."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}

    @property
    def members(self) -> list[Heartbeat]:
        return list(self.beats.values())

    def says(self, role: str, name: str, sequence: int, facts: dict[str, Any]) -> None:
        self.beats[name] = Heartbeat(
            role=role, instance=name, state="ready", pid=1, host="h", started_at=0.0, sequence=sequence, facts=facts
        )  # fmt: skip


class FewestRequests:
    """The rule of before, as a router."""

    waiting = demand = 0

    def __init__(self) -> None:
        self._out: Counter[str] = Counter({f"policy-{index}": 0 for index in range(ENGINES)})

    def notify(self) -> None: ...

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        name = min(self._out, key=lambda name: (self._out[name], name))
        self._out[name] += 1
        return EngineRef("", name, "policy@1.0")

    def release(self, ref: EngineRef) -> None:
        self._out[ref.instance] -= 1

    def served(self, ref: EngineRef, made: int) -> None: ...


@dataclass(eq=False)
class Episode:
    """`held`: tokens of its history; `last`: the engine that holds them."""

    worker: int
    turns: int
    held: int
    wakes_at: float = 0.0
    last: str = ""
    asks: asyncio.Task[EngineRef] | None = None


@dataclass
class Fleet:
    """One run. `limit`: None is the old rule, 0 ours, else a fixed one."""

    limit: int | None
    slots: int
    seed: int = 0
    engines: dict[str, Engine] = field(default_factory=lambda: {f"policy-{i}": Engine() for i in range(ENGINES)})
    out: dict[int, tuple[Episode, EngineRef, int]] = field(default_factory=dict)
    moved: int = 0
    continued: int = 0
    finished: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.present, self.workers = Present(), Present()
        self.limits = {name: Limit(LimitRules(longest_tokens=LONGEST)) for name in self.engines}
        self.routers = [FewestRequests() if self.limit is None else self._router(index) for index in range(WORKERS)]
        self.numbers = itertools.count(1)

    def _router(self, index: int) -> Any:
        rng = random.Random(self.seed + index)
        workers: Any = self.workers
        return PresenceRouter(
            self.present, "policy", workers=workers, me=f"rollout-{index}", rng=rng, clock=lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip

    def announce(self) -> None:
        number = next(self.numbers)
        for name, engine in self.engines.items():
            limit = self.limit or self.limits[name].observe(engine.sample())
            load = {
                "there": engine.there,
                "tokens": int(engine.held.sum()),
                "limit": limit,
                "capacity": engine.capacity,
            }
            facts = {"group": "policy", "url": name, "version": "policy@1.0", "load": load}
            self.present.says("engine", name, number, facts)
        for index, router in enumerate(self.routers):
            self.workers.says("rollout", f"rollout-{index}", number, {"demand": router.demand})
        for router in self.routers:
            router.notify()

    def begin(self, worker: int) -> Episode:
        return Episode(worker, int(self.rng.integers(1, _MOST_TURNS + 1)), int(self.rng.integers(200, 800)))

    async def run(self, seconds: float) -> None:
        episodes = [self.begin(index % WORKERS) for index in range(WORKERS * self.slots)]
        for tick in range(int(seconds / TICK_S)):
            self.now = tick * TICK_S
            if tick % 2 == 0:
                self.announce()
            await self._advance(episodes, tick * TICK_S)
            for name, engine in self.engines.items():
                for request in engine.tick(TICK_S):
                    self._answered(*self.out.pop(id(request)), name, tick * TICK_S)
        for episode in episodes:
            if episode.asks is not None:
                episode.asks.cancel()

    async def _advance(self, episodes: list[Episode], now: float) -> None:
        for index, episode in enumerate(episodes):
            if episode.turns == 0:
                episodes[index] = episode = self.begin(episode.worker)
            if episode.asks is None and episode.wakes_at <= now:
                history = np.full(episode.held, id(episode) & 0x7FFFFFFF, np.int32)
                wanted = Wanted(tokens=history, max_new_tokens=LONGEST, prefers=episode.last)
                pick = self.routers[episode.worker].pick(1e6, wanted)
                episode.asks = asyncio.create_task(pick)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for episode in episodes:
            if episode.asks is not None and episode.asks.done() and episode.wakes_at <= now:
                self._send(episode, episode.asks.result())

    def _send(self, episode: Episode, ref: EngineRef) -> None:
        self.continued += bool(episode.last)
        self.moved += episode.last not in ("", ref.instance)
        fresh = 100 if episode.last == ref.instance else episode.held
        mean, sigma = 600.0, 1.13
        answer = int(np.clip(self.rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, LONGEST // 2 - 800))
        request = Request(episode.held, fresh, answer)
        self.out[id(request)] = (episode, ref, answer)
        self.engines[ref.instance].submit(request)
        episode.wakes_at = float("inf")

    def _answered(self, episode: Episode, ref: EngineRef, answer: int, name: str, now: float) -> None:
        router = self.routers[episode.worker]
        router.served(ref, answer)
        router.release(ref)
        episode.asks, episode.last, episode.held = None, name, episode.held + answer + 100
        episode.turns = 0 if episode.held > LONGEST // 2 else episode.turns - 1
        self.finished += episode.turns == 0
        episode.wakes_at = now + float(self.rng.exponential(5.0))


def _row(name: str, fleet: Fleet, seconds: float) -> dict[str, Any]:
    engines = fleet.engines.values()
    served = sum(engine.served for engine in engines)
    return {
        "policy": name,
        "tokens_per_s": round(sum(engine.made for engine in engines) / seconds),
        "preempted": round(sum(engine.preempted for engine in engines) / served, 4),
        "prefilled": round(sum(engine.prefilled for engine in engines) / sum(engine.made for engine in engines), 2),
        "moved_turns": round(fleet.moved / max(1, fleet.continued), 3),
        "episodes": fleet.finished,
    }


async def measure(size: str) -> dict[str, Any]:
    """Rows by policy. `preempted` of a request, `prefilled` for each token made."""
    seconds, slots = (120.0, 64) if size == "smoke" else (1200.0, 128)
    fixed = () if size == "smoke" else (24, 32, 40, 48)
    policies = {"ours": 0, "fewest requests": None, **{f"fixed {limit}": limit for limit in fixed}}
    rows = []
    for name, limit in policies.items():
        fleet = Fleet(limit, slots)
        await fleet.run(seconds)
        rows.append(_row(name, fleet, seconds))
    return {"engines": ENGINES, "workers": WORKERS, "slots": slots, "virtual_s": seconds, "rows": rows}
