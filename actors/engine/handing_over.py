"""What a server has in hand when it is to end: its requests come back with the tokens they have, and go on elsewhere.

    draining is announced --> the word gets round --> abort all --> partial answers --> clients resume them on other engines

Invariant: nothing is waited for longer than `HAND_OVER_S`; what is not handed over by then is made again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineError

_log = logging.getLogger(__name__)

HAND_OVER_S: Final = 5.0
_WORD_S: Final = 0.3
"""Until clients know that the engine drains: what comes back before then could be sent here again."""
_LOOK_S: Final = 0.05
_ANSWERS_S: Final = 0.5
"""For the answers of aborted requests to leave the server, which no longer counts them."""


async def hand_over(control: EngineControl) -> int:
    """Returns how many requests came back."""
    count = 0
    try:
        async with asyncio.timeout(HAND_OVER_S):
            await asyncio.sleep(_WORD_S)
            load = await control.loads()
            count = load.running + load.waiting
            if not count:
                return 0
            await control.abort_all()
            while load.running + load.waiting:  # the server has no event for it
                await asyncio.sleep(_LOOK_S)
                load = await control.loads()
            await asyncio.sleep(_ANSWERS_S)
    except (EngineError, TimeoutError) as error:
        _log.warning("%d requests of this engine are made again elsewhere, they were not handed over: %r", count, error)
        return 0
    _log.info("%d requests were handed over", count)
    return count
