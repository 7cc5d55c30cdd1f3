"""How far each policy needs the sample log: several trainers read it, and it is trimmed below the smallest of their floors.

Each writes its own into the RUN register before it trims. Invariant: a floor only grows, so whatever another trainer reads of
it late is too small, and trims too little. A policy that has not told one yet needs everything, one that is done nothing: it
reads the log no more, and nobody would ever make room in it for those that go on.
"""

from __future__ import annotations

from typing import Final

from physarum.actors import policies, states
from physarum.actors.context import Context
from physarum.actors.states import Floor, TrainerDone

_BEGINNING: Final = 1


class Floors:
    """Of a run with several policies; with one alone, its own floor counts and nothing is written."""

    def __init__(self, context: Context) -> None:
        self._register, self._done = context.run_register(Floor), context.run_register(TrainerDone)
        views = {view.policy: view.model.name for view in context.config.views()}
        self._own = views.pop(context.policy)
        self._others = views

    async def agreed(self, own: int) -> int:
        """Tells `own`; below what is returned nobody needs the log."""
        if not self._others:
            return own
        await self._register.put(Floor(own), states.FLOOR, self._own)
        return min(own, await self._smallest(own))

    async def is_ours(self, own: int) -> bool:
        """Whether it is this policy that keeps the log from being trimmed further."""
        return not self._others or own <= await self._smallest(own)

    async def _smallest(self, own: int) -> int:
        """Of the others; `own` where all are done."""
        told = [await self._floor(policy, name) for policy, name in self._others.items()]
        return min((one for one in told if one is not None), default=own)

    async def _floor(self, policy: str, name: str) -> int | None:
        if (await self._done.get(*policies.key(states.TRAINER_DONE, policy))).value is not None:
            return None
        told = (await self._register.get(states.FLOOR, name)).value
        return _BEGINNING if told is None else told.sequence
