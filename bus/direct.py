"""Direct reads of many messages by subject in few requests (JetStream's batches and multi_last).

Invariant: a list is whole, or an error. The server answers multi_last from one state of the stream, so that a value which is
replaced meanwhile is found as it was or as it is, never missed (a scan by sequence could meet neither).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.msg import Msg

from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, BusUnreachableError

_MOST: Final = 1024
"""Subjects that the server answers one multi_last for; for more it sends none."""
_PIECE: Final = 512
_TORN: Final = 8
"""Times in a row that values may expire while the server reads its list of them."""
_TOO_MANY: Final = "413"
_NOTHING: Final = "No Results"
"""404 otherwise means that a value went while the list was read."""
# 204: the end of what there is; 404: there is nothing.
_ENDS: Final = ("204", "404")


def subject_of(message: Msg) -> str:
    """Where a message that was read directly is stored."""
    return (message.headers or {}).get("Nats-Subject", "")


async def last_of(bus: Bus, stream: str, pattern: str) -> list[Msg]:
    """The last message of every subject of `stream` that matches `pattern`, by subject where they are more than 1,024.

    Raises BusUnreachableError when a list does not end within the bus's request timeout, or BusRefusedError when the
    server does not give it.
    """
    found = await _last_of(bus, stream, [pattern])
    if found is not None:
        return found
    subjects = await _subjects(bus, stream, pattern)
    parts = [subjects[at : at + _PIECE] for at in range(0, len(subjects), _PIECE)]
    return [message for part in parts for message in await _last_of(bus, stream, part) or []]


async def _last_of(bus: Bus, stream: str, patterns: list[str]) -> list[Msg] | None:
    """None when more subjects match than the server answers for."""
    for _ in range(_TORN):
        found, end = await _listed(bus, stream, {"multi_last": patterns, "batch": _MOST})
        if end["Status"] == _TOO_MANY:
            return None
        if end["Status"] not in _ENDS:
            raise BusRefusedError(
                f"{stream} ended its list of {patterns[0]} with status {end['Status']}: {_words(end)}"
            )
        if end["Status"] == "204":
            _check_whole(stream, found, end)
            return found
        if not found and _words(end) == _NOTHING:
            return found
    raise BusUnreachableError(
        f"{stream}: values of {patterns[0]} expired {_TORN} times while they were read; ask again"
    )


async def _subjects(bus: Bus, stream: str, pattern: str) -> list[str]:
    """Every subject that has a message, sorted."""
    found: dict[str, int] = {}
    while True:
        reply = await bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
        page = reply["state"].get("subjects") or {}
        found |= page
        if not page or len(found) >= reply.get("total", 0):
            return sorted(found)


def _words(end: dict[str, str]) -> str:
    return end.get("Description", "")


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
