"""Sampling that is changed while the run goes on (`actorctl sampling`): each worker lays it over what its tasks bring.

Invariant: a worker that begins work has read what was asked for before; a request that begins after a change was heard of has
it, one in flight ends as it began. Which change that is, the worker announces (fact `sampling`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from physarum.actors import states
from physarum.actors.runtime import Actor
from physarum.agents.session import LiveSampling
from physarum.bus.errors import BusError

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0


async def read_sampling(actor: Actor, live: LiveSampling) -> None:
    """Takes what is asked for now. Raises BusError."""
    found = (await actor.context.run_register(states.ChangedSampling).get(states.SAMPLING)).value
    values = {} if found is None else found.values
    if values != live.values:
        _log.info("sampling is %s from here on, over what is configured", values or "as configured")
        live.values = values
        actor.facts = {**actor.facts, "sampling": values}
        actor.announce()


async def follow_sampling(actor: Actor, live: LiveSampling) -> None:
    """Takes every change, for ever."""
    async with actor.context.run_register(states.ChangedSampling).watch(states.SAMPLING) as changed:
        while True:
            await changed.wait()
            changed.clear()
            try:
                await read_sampling(actor, live)
            except BusError as error:  # no event says when a server that is back serves its streams again
                _log.warning("a change of sampling is not read yet, trying again: %s", error)
                await asyncio.sleep(_AGAIN_S)
                changed.set()
