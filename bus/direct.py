"""Direct reads of many last values in one request (JetStream's multi_last)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
import nats.errors
from nats.aio.msg import Msg

from physarum.bus.connection import Bus
from physarum.bus.errors import BusUnreachableError

_log = logging.getLogger(__name__)

_MOST: Final = 4096
# 204: the end of what there is; 404: there is nothing.
_ENDS: Final = ("204", "404")


async def last_of(bus: Bus, stream: str, pattern: str) -> list[Msg]:
    """The last message of every subject of `stream` that matches `pattern`.

    Raises BusUnreachableError when the list does not end within the bus's request timeout.
    """
    body = msgspec.json.encode({"multi_last": [pattern], "batch": _MOST})
    inbox = bus.client.new_inbox()
    found: list[Msg] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def collect(message: Msg) -> None:
        status = (message.headers or {}).get("Status")
        if status is None:
            found.append(message)
        elif not ended.done():
            ended.set_result(status)

    subscription = await bus.subscribe(inbox, collect)
    try:
        await bus.client.publish(f"$JS.API.DIRECT.GET.{stream}", body, reply=inbox)
        async with asyncio.timeout(bus.timeout_s):
            status = await ended
    except (TimeoutError, nats.errors.Error) as error:
        raise BusUnreachableError(f"{stream} did not list {pattern} within {bus.timeout_s:g} s") from error
    finally:
        if not bus.client.is_closed:
            await subscription.unsubscribe()
    if status not in _ENDS:
        _log.warning("%s ended its list of %s with status %s", stream, pattern, status)
    return found
