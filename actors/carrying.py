"""The carrier of an actor's process (`checkpoint.carrier`): how the chunks of versions travel between hosts beside HTTP."""

from __future__ import annotations

import asyncio

from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.configs.secrets import read_secret
from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.carriers.registry import carrier_for
from physarum.weightsync.errors import CarrierError


async def carrier_of(context: Context) -> Carrier | None:
    """The caller's to close; None where weights do not travel (no `checkpoint.token_env`), or by HTTP alone. Raises
    UnrecoverableError: a new start would lack the same."""
    config = context.config.checkpoint
    if read_secret(config.token_env) is None:
        return None
    try:
        return await asyncio.to_thread(carrier_for, config.carrier, context.host)
    except CarrierError as error:
        raise UnrecoverableError(str(error)) from error
