"""`age.in_flight: abort`: cuts off the running episodes that can no longer meet the age bound.

An execution with a token over the bound is dropped when it is consumed (`age.consumption: drop`, the only policy under which
this makes sense), and the step about to begin leaves at least the number of the published head. So once the head is more
than `age.bound` past the version of an episode's first token, whatever the episode still makes is lost, and its slot with it.

Invariant: only what is certainly lost is cut off. The version of a first token that an engine has reported is exact; while
the first request runs it is taken as the head when it went to an engine, the newest that this could serve then. A request that
waits for an engine has no age; one that waits inside an engine begins later, by as little as `concurrency` lets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.rollout.cutting import CutOffError, Cuttable
from physarum.actors.waiting import until
from physarum.agents.client import EngineClient
from physarum.agents.environments.lease import Leased
from physarum.agents.protocols import Client, Generation, TokenIds, Tokenizer
from physarum.bus.records import Task
from physarum.bus.register import Register
from physarum.bus.version import Version


class HopelessError(CutOffError):
    """An episode's first token is over the age bound already: its execution would be dropped."""


class Watched(Cuttable):
    """One running episode. `first`: the number of the weights that made its first token; None before it was asked for."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound
        self.first: int | None = None

    def look(self, head: int) -> None:
        """Cuts the episode off when the published weights are too far past its first token."""
        if self.first is not None and head - self.first > self._bound:
            self.cut(HopelessError(f"its first token was made by weights {self.first}, the bound is {self._bound}"))


class InFlight:
    """The episodes of one worker that are watched; follows the head."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._running: set[Watched] = set()
        self._label = ""
        self._head: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether any source's executions are cut off."""
        age = self._context.config.age
        return any(age.of(name).in_flight == "abort" for name in ("", *age.streams))

    def applies(self, task: Task) -> bool:
        return task.task_class != "eval" and self._context.config.age.of(task.source).in_flight == "abort"

    async def follow(self) -> None:
        """Looks at every running episode whenever the head moves, for ever."""
        heads: Register[states.Head] = Register(self._context.bus, self._context.publisher, "weights", states.Head)
        key = (states.HEAD, self._context.config.model.name)
        while True:
            head = await until(heads, self._is_news, *key)
            self._label, self._head = head.label, head.number
            for one in tuple(self._running):
                one.look(head.number)

    def _is_news(self, head: states.Head) -> bool:
        return head.label != self._label

    async def run(self, task: Task, client: EngineClient, generate: Any) -> Any:
        """`generate(client)` over a client that notes versions. Raises HopelessError when the episode was cut off."""
        if not self.applies(task):
            return await generate(client)
        watched = Watched(self._context.config.age.of(task.source).bound)
        self._running.add(watched)
        client.on_sent = lambda: self.begins(watched)
        try:
            return await watched.run(generate(_NotingClient(client, watched, self)))
        finally:
            self._running.discard(watched)

    def begins(self, watched: Watched) -> None:
        """A request goes out: when it is the first, the head is the newest that can make its first token."""
        if watched.first is None:
            watched.first = self._head

    def made(self, watched: Watched, generation: Generation) -> None:
        """What the engine reports replaces what was assumed."""
        numbers = [Version.parse(span.version).number for span in generation.spans]
        if numbers and (watched.first is None or watched.first >= numbers[0]):
            watched.first = numbers[0]
        if self._head is not None:
            watched.look(self._head)


class _NotingClient:
    """The episode's client, watched."""

    def __init__(self, client: Client, watched: Watched, in_flight: InFlight) -> None:
        self._client, self._watched, self._in_flight = client, watched, in_flight

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self._client.sampling

    def environment(self, name: str) -> AbstractAsyncContextManager[Leased]:
        return self._client.environment(name)

    def of(self, policy: str) -> Client:
        return self._client.of(policy)  # nothing is watched where several policies are trained

    def at_least(self, number: int) -> _NotingClient:
        return _NotingClient(self._client.at_least(number), self._watched, self._in_flight)

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        made = await self._client.generate(token_ids, sampling, max_new_tokens=max_new_tokens)
        self._in_flight.made(self._watched, made)
        return made
