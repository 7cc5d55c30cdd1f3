"""Which engine serves the next request: the least loaded ready one, as presence tells; waiting is on presence alone."""

from __future__ import annotations

import asyncio
from collections import Counter

from physarum.actors.policy_engines import READY
from physarum.agents.errors import NoEngineError
from physarum.agents.routing import EngineRef
from physarum.bus.presence import Heartbeat, Roster
from physarum.bus.version import Version


class PresenceRouter:
    """Implements agents.routing.Router over a roster of role "engine" for one group of engines (a model)."""

    def __init__(self, roster: Roster, group: str) -> None:
        self._roster = roster
        self._group = group
        self._running: Counter[str] = Counter()
        self._sick: dict[str, float] = {}
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """To be called at every change of the roster: wakes whoever waits for an engine."""
        self._changed.set()

    async def pick(self, deadline_s: float, number: int | None = None) -> EngineRef:
        """The ready engine (serving weights `number`, if given) with the fewest of our requests.

        Raises NoEngineError after `deadline_s` without one.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    self._changed.clear()
                    ref = self._best(number)
                    if ref is not None:
                        self._running[ref.instance] += 1
                        return ref
                    await self._changed.wait()
        except TimeoutError as error:
            seen = (
                ", ".join(f"{beat.instance} is {beat.state}" for beat in self._roster.members)
                or "none has announced itself"
            )
            wanted = "" if number is None else f" and served weights {number}"
            raise NoEngineError(
                f"no engine of group {self._group} was ready{wanted} within {deadline_s:g} s ({seen});"
                " see `actorctl ps` and the engines' logs"
            ) from error

    def release(self, ref: EngineRef) -> None:
        self._running[ref.instance] -= 1

    def failed(self, ref: EngineRef, error: Exception) -> None:
        """Leaves the engine out until its next heartbeat that says ready (a restarted one announces itself anew)."""
        for beat in self._candidates():
            if beat.instance == ref.instance:
                self._sick[ref.instance] = beat.sequence + beat.started_at

    def _best(self, number: int | None) -> EngineRef | None:
        ready = [beat for beat in self._candidates() if beat.state == READY and not self._is_sick(beat)]
        if number is not None:
            ready = [beat for beat in ready if Version.parse(beat.facts["version"]).number == number]
        if not ready:
            return None
        beat = min(ready, key=lambda candidate: (self._running[candidate.instance], candidate.instance))
        return EngineRef(url=beat.facts["url"], instance=beat.instance, version=beat.facts["version"])

    def _candidates(self) -> list[Heartbeat]:
        return [beat for beat in self._roster.members if beat.facts.get("group") == self._group]

    def _is_sick(self, beat: Heartbeat) -> bool:
        return self._sick.get(beat.instance) == beat.sequence + beat.started_at
