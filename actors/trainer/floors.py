"""How far each policy needs the sample log: several trainers read it, and it is trimmed below the smallest of their floors.

Each writes its own into the RUN register before it trims. Invariant: a floor only grows, so whatever another trainer reads of
it late is too small, and trims too little. A policy that has not told one yet needs everything.
"""

from __future__ import annotations

from typing import Final

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.states import Floor

_BEGINNING: Final = 1


class Floors:
    """Of a run with several policies; with one alone, its own floor counts and nothing is written."""

    def __init__(self, context: Context) -> None:
        self._register = context.run_register(Floor)
        views = {view.policy: view.model.name for view in context.config.views()}
        self._own = views.pop(context.policy)
        self._others = list(views.values())

    async def agreed(self, own: int) -> int:
        """Tells `own`; below what is returned nobody needs the log."""
        if not self._others:
            return own
        await self._register.put(Floor(own), states.FLOOR, self._own)
        return min(own, await self._smallest())

    async def is_ours(self, own: int) -> bool:
        """Whether it is this policy that keeps the log from being trimmed further."""
        return not self._others or own <= await self._smallest()

    async def _smallest(self) -> int:
        told = [(await self._register.get(states.FLOOR, name)).value for name in self._others]
        return min(_BEGINNING if one is None else one.sequence for one in told)
