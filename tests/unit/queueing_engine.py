"""A queueing model of an engine for tests of its limit: memory-bound decoding, a KV pool, preemption when it is full.

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
"""(prompt, answer) of the next request."""


@dataclass
class Engine:
    lengths: Lengths
    capacity: int = 200_000
    base_ms: float = 8.0
    per_ms: float = 0.1
    prefill_per_s: float = 20_000.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    held: np.ndarray = field(default_factory=lambda: np.zeros(0))
    left: np.ndarray = field(default_factory=lambda: np.zeros(0))
    queue: deque[tuple[float, float]] = field(default_factory=deque)
    made: float = 0.0
    prefilled: float = 0.0
    preempted: int = 0
    reported: int = 0
    served: int = 0
    now: float = 0.0

    @property
    def there(self) -> int:
        return len(self.held) + len(self.queue)

    def submit(self, count: int) -> None:
        for _ in range(max(0, count)):
            prompt, answer = self.lengths(self.rng)
            self.queue.append((float(prompt), float(answer)))

    def tick(self, seconds: float) -> None:
        """One step: let in, decode, preempt, let out."""
        self.now += seconds
        budget, let_in = self.prefill_per_s * seconds, []
        room = self.capacity - self.held.sum()
        while self.queue and budget > 0 and self.queue[0][0] < room:
            let_in.append(self.queue.popleft())
            budget, room = budget - let_in[-1][0], room - let_in[-1][0]
            self.prefilled += let_in[-1][0]
        if let_in:
            self.held = np.concatenate([self.held, [prompt for prompt, _ in let_in]])
            self.left = np.concatenate([self.left, [answer for _, answer in let_in]])
        share = max(0.0, budget) / (self.prefill_per_s * seconds)  # prefilling takes time from decoding
        tokens = share * seconds * 1e3 / (self.base_ms + self.per_ms * len(self.held))
        made = np.minimum(tokens, self.left)
        self.held, self.left = self.held + made, self.left - made
        self.made += float(made.sum())
        while self.held.sum() > self.capacity:
            self.queue.appendleft((float(self.held[-1]), float(self.left[-1])))
            self.held, self.left = self.held[:-1], self.left[:-1]
            self.preempted += 1
        running = self.left > 0
        self.served += int((~running).sum())
        self.held, self.left = self.held[running], self.left[running]

    def sample(self) -> LoadSample:
        report = LoadSample(
            at=self.now,
            running=len(self.held),
            waiting=len(self.queue),
            used_tokens=int(self.held.sum()),
            capacity_tokens=self.capacity,
            made_tokens=self.made,
            prefilled_tokens=int(self.prefilled),
            waiting_tokens=int(sum(prompt for prompt, _ in self.queue)),
            retracted=self.preempted - self.reported,
        )
        self.reported = self.preempted
        return report


def lognormal(prompt: int, mean: float, sigma: float, cap: int) -> Lengths:
    """Answers of a long tail: sigma 1.13 has p99 / mean = 7.3."""

    def draw(rng: np.random.Generator) -> tuple[int, int]:
        return prompt, int(min(cap, max(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma))))

    return draw
