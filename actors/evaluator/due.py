"""`evaluation.overflow: wait`: the versions whose turn to be evaluated has come, oldest first.

Invariant: what is due stands in WEIGHTS before it waits, so that the checkpoint service keeps those versions, and an evaluator
that starts anew goes on with them.
"""

from __future__ import annotations

import asyncio

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.evaluator.watching import Watch
from physarum.bus.register import Register
from physarum.bus.version import Version


class Due:
    """Every `every`-th number after `last`, or the next one published after it."""

    def __init__(self, context: Context, watch: Watch, every: int, last: int) -> None:
        self._register = Register(context.bus, context.publisher, "weights", states.Pins)
        self._key = (states.EVAL_DUE, context.config.model.name)
        self._watch, self._every, self._last = watch, every, last
        self._labels: list[str] = []
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """Notes each version as it becomes due, for ever."""
        stored = (await self._register.get(*self._key)).value
        self._labels = [] if stored is None else list(stored.labels)
        await self._store(self._labels)
        last = Version.parse(self._labels[-1]).number if self._labels else self._last
        while True:
            head = await self._watch.head_from(last + self._every)
            last = head.number
            await self._store([*self._labels, head.label])

    async def next(self) -> str:
        """The oldest one; it stays until it is `done`."""
        while not self._labels:
            self._changed.clear()
            await self._changed.wait()
        return self._labels[0]

    async def done(self, label: str) -> None:
        await self._store([one for one in self._labels if one != label])

    async def _store(self, labels: list[str]) -> None:
        self._labels = labels
        await self._register.put(states.Pins(labels), *self._key, deadline_s=None)
        self._changed.set()
