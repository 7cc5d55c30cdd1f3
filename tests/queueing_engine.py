"""A queueing model of an engine: memory-bound decoding, a KV pool, preemption when it is full.

With n running each gets a token every `base_ms + per_ms * n`. A request holds its prompt and what it has made; the engine
lets requests in while their prompt fits (no reservation for what they will make: the worst case for who limits it), and
when the pool is full it puts the newest back into the queue, to prefill again all that they had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from physarum.actors.engine.limit import LoadSample

Lengths = Callable[[np.random.Generator], tuple[int, int]]
"""(prompt, answer) of a request."""


@dataclass
class Request:
    """`held`: its prompt; `fresh`: tokens of it that must be prefilled; `left`: tokens still to be made."""

    held: float
    fresh: float
    left: float


@dataclass
class Engine:
    """`requests` runs beside `held` and `left`, which are what changes with every step."""

    capacity: int = 200_000
    base_ms: float = 8.0
    per_ms: float = 0.1
    prefill_per_s: float = 20_000.0
    requests: list[Request] = field(default_factory=list)
    held: np.ndarray = field(default_factory=lambda: np.zeros(0))
    left: np.ndarray = field(default_factory=lambda: np.zeros(0))
    queue: deque[Request] = field(default_factory=deque)
    made: float = 0.0
    prefilled: float = 0.0
    preempted: int = 0
    reported: int = 0
    served: int = 0
    now: float = 0.0

    @property
    def there(self) -> int:
        return len(self.requests) + len(self.queue)

    def submit(self, request: Request) -> None:
        self.queue.append(request)

    def tick(self, seconds: float) -> list[Request]:
        """One step: let in, decode, preempt; returns who is done."""
        self.now += seconds
        share = self._let_in(self.prefill_per_s * seconds)  # prefilling takes time from decoding
        tokens = share * seconds * 1e3 / (self.base_ms + self.per_ms * len(self.requests))
        made = np.minimum(tokens, self.left)
        self.held, self.left = self.held + made, self.left - made
        self.made += float(made.sum())
        while self.held.sum() > self.capacity:
            self._preempt()
        over = self.left <= 0
        done = [self.requests[index] for index in np.nonzero(over)[0]]
        if done:
            self.requests = [self.requests[index] for index in np.nonzero(~over)[0]]
            self.held, self.left = self.held[~over], self.left[~over]
        self.served += len(done)
        return done

    def _let_in(self, budget: float) -> float:
        """The share of the step that is left for decoding."""
        whole, room, let_in = budget, self.capacity - self.held.sum(), []
        while self.queue and budget > 0 and self.queue[0].held < room:
            one = self.queue.popleft()
            let_in.append(one)
            budget, room = budget - one.fresh, room - one.held
            self.prefilled += one.fresh
        if let_in:
            self.requests += let_in
            self.held = np.concatenate([self.held, [one.held for one in let_in]])
            self.left = np.concatenate([self.left, [one.left for one in let_in]])
        return max(0.0, budget) / whole

    def _preempt(self) -> None:
        newest = self.requests.pop()
        newest.held = newest.fresh = float(self.held[-1])
        newest.left = float(self.left[-1])
        self.queue.appendleft(newest)
        self.held, self.left = self.held[:-1], self.left[:-1]
        self.preempted += 1

    def sample(self) -> LoadSample:
        report = LoadSample(
            at=self.now,
            running=len(self.requests),
            waiting=len(self.queue),
            used_tokens=int(self.held.sum()),
            capacity_tokens=self.capacity,
            made_tokens=self.made,
            prefilled_tokens=int(self.prefilled),
            waiting_tokens=int(sum(one.fresh for one in self.queue)),
            retracted=self.preempted - self.reported,
        )
        self.reported = self.preempted
        return report


def lognormal(prompt: int, mean: float, sigma: float, cap: int) -> Lengths:
    """Answers of a long tail: sigma 1.13 has p99 / mean = 7.3."""

    def draw(rng: np.random.Generator) -> tuple[int, int]:
        return prompt, int(min(cap, max(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma))))

    return draw
