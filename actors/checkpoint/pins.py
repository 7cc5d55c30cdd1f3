"""The versions that users pinned, as the checkpoint service asks for them before it lets old ones go."""

from __future__ import annotations

import logging

from physarum.actors import states
from physarum.actors.context import Context
from physarum.bus.errors import BusError
from physarum.bus.register import Register

_log = logging.getLogger(__name__)


async def pinned(context: Context) -> frozenset[str] | None:
    """Their labels; None, with a warning, where the bus does not say: then nothing may be let go."""
    register = Register(context.bus, context.publisher, "weights", states.Pins)
    try:
        entry = await register.get(states.PINS, context.config.model.name)
    except BusError as error:
        _log.warning("no version is let go, since nobody says which are pinned: %s", error)
        return None
    return frozenset(entry.value.labels if entry.value else ())
