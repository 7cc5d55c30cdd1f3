"""Direct reads of many messages by subject in few requests (JetStream's batches and multi_last)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.msg import Msg

from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, BusUnreachableError

_log = logging.getLogger(__name__)

_MOST: Final = 4096
_PIECE: Final = 512
# 204: the end of what there is; 404: there is nothing.
_ENDS: Final = ("204", "404")


def subject_of(message: Msg) -> str:
    """Where a message that was read directly is stored."""
    return (message.headers or {}).get("Nats-Subject", "")


async def last_of(bus: Bus, stream: str, pattern: str) -> list[Msg]:
    """The last message of every subject of `stream` that matches `pattern`.

    Raises BusUnreachableError when the list does not end within the bus's request timeout.
    """
    found, end = await _listed(bus, stream, {"multi_last": [pattern], "batch": _MOST})
    if end["Status"] not in _ENDS:
        _log.warning("%s ended its list of %s with status %s", stream, pattern, end["Status"])
    return found


async def matching(bus: Bus, stream: str, pattern: str) -> AsyncIterator[Msg]:
    """Every message of `stream` on subjects that match `pattern`, oldest first (a work queue's too), consuming none.

    Raises BusUnreachableError, or BusRefusedError when the server does not give the whole list.
    """
    start = 1
    while True:
        found, end = await _listed(bus, stream, {"seq": start, "next_by_subj": pattern, "batch": _PIECE})
        if end["Status"] not in _ENDS:
            raise BusRefusedError(f"{stream} ended its list of {pattern} from {start} with status {end['Status']}")
        _check_whole(stream, found, end)
        for message in found:
            yield message
        if not found:
            return
        start = int((found[-1].headers or {})["Nats-Sequence"]) + 1


def _check_whole(stream: str, found: list[Msg], end: dict[str, str]) -> None:
    """Each message, and the end, names the sequence before it."""
    before = 0
    for headers in (*(message.headers or {} for message in found), *([end] if found else [])):
        if int(headers["Nats-Last-Sequence"]) != before:
            raise BusUnreachableError(f"{stream}: messages after {before} were lost on the way; ask again")
        before = int(headers.get("Nats-Sequence", before))


async def _listed(bus: Bus, stream: str, query: dict[str, Any]) -> tuple[list[Msg], dict[str, str]]:
    """The messages that one request brings, and the headers of its end."""
    inbox = bus.client.new_inbox()
    found: list[Msg] = []
    ended: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    async def collect(message: Msg) -> None:
        headers = dict(message.headers or {})
        if "Status" not in headers:
            found.append(message)
        elif not ended.done():
            ended.set_result(headers)

    subscription = await bus.subscribe(inbox, collect)
    try:
        await bus.client.publish(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(query), reply=inbox)
        async with asyncio.timeout(bus.timeout_s):
            return found, await ended
    except (TimeoutError, nats.errors.Error) as error:
        raise BusUnreachableError(f"{stream} did not answer {query} within {bus.timeout_s:g} s") from error
    finally:
        if not bus.client.is_closed:
            await subscription.unsubscribe()
