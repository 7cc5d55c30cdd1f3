"""Waiting for a server that generates."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineError

_log = logging.getLogger(__name__)

_FIRST_PROBE_S: Final = 0.25
_SLOWEST_PROBE_S: Final = 2.0


async def until_healthy(control: EngineControl, empty: bool = False) -> None:
    """HTTP readiness has no event: ask, at most every two seconds. Any named failure means not yet. `empty`: it need not make a
    token, for it may wait for its weights; it is enough that it answers."""
    delay_s = _FIRST_PROBE_S
    while True:
        try:
            await (control.model_info() if empty else control.health())
        except EngineError as error:
            _log.debug("engine %s is not ready: %s", control.base_url, error)
        else:
            return
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 1.5, _SLOWEST_PROBE_S)
