"""Which actors are cordoned, kept in the RUN register: one that is started again takes nothing either."""

from __future__ import annotations

from collections.abc import Collection

from physarum.actors import states
from physarum.bus.connection import Bus
from physarum.bus.errors import WrongSequenceError
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register


async def is_cordoned(bus: Bus, publisher: Publisher, instance: str) -> bool:
    """Raises BusError."""
    found = await _register(bus, publisher).get(states.CORDONED)
    return found.value is not None and instance in found.value.instances


async def record(bus: Bus, publisher: Publisher, more: Collection[str] = (), fewer: Collection[str] = ()) -> None:
    """`more` are cordoned from now on, `fewer` not any more. Raises BusError."""
    register = _register(bus, publisher)
    while True:
        entry = await register.get(states.CORDONED)
        before = entry.value.instances if entry.value is not None else frozenset()
        after = (before | set(more)) - set(fewer)
        if after == before:
            return
        try:
            await register.compare_and_set(states.Cordoned(frozenset(after)), entry.revision, states.CORDONED)
        except WrongSequenceError:
            continue  # another one was cordoned at the same time
        return


def _register(bus: Bus, publisher: Publisher) -> Register[states.Cordoned]:
    return Register(bus, publisher, "run", states.Cordoned)
