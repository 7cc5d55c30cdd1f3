"""An engine's ear for broadcasts: it takes part in each that names it, and fetches what it missed like anybody else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from physarum.bus.errors import BusError
from physarum.bus.register import Register
from physarum.weightsync.broadcast import MEMBER_FACT, ROUND, Round
from physarum.weightsync.transports.nccl import NcclTransport

if TYPE_CHECKING:
    from physarum.actors.engine.actor import EngineActor

_log = logging.getLogger(__name__)


async def listen(actor: EngineActor, transport: NcclTransport) -> None:
    """For ever."""
    rounds: Register[Round] = Register(actor.bus, actor.publisher, "weights", Round)
    model, last = actor.config.model.name, 0
    async with rounds.watch(ROUND, model) as changed:
        actor.facts = {**actor.facts, MEMBER_FACT: transport.name}
        while True:
            changed.clear()
            try:
                entry = await rounds.get(ROUND, model)
            except BusError as error:
                _log.warning("a broadcast may be missed, its version is fetched: %s", error)
            else:
                if entry.value is not None and entry.revision != last:
                    last = entry.revision
                    transport.join(entry.value)
            await changed.wait()
