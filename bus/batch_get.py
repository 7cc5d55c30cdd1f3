"""Many messages of a log by sequence, in few requests (JetStream's batch direct get).

One direct get per message costs a round trip and a task each. A batch request names the first sequence, how many, and a
bound of bytes; the server sends the messages and an end mark. What a request did not bring (its bound was reached, or
the connection broke) is asked for again, so the result is whole but for what the stream does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import nats.errors
import orjson
from nats.aio.msg import Msg

from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, BusUnreachableError

_SLACK: Final = 4
"""Runs with at most this many unwanted messages between them are read as one: cheaper than another request."""
_MOST_MESSAGES: Final = 512
_MOST_BYTES: Final = 8 << 20
_PARALLEL: Final = 8
# 204: the end of what was asked for; 404: nothing at or above that sequence.
_ENDS: Final = ("204", "404")
_UNREADY: Final = "503"
_UNREADY_S: Final = 0.1


async def by_sequence(bus: Bus, stream: str, sequences: Iterable[int]) -> dict[int, Msg]:
    """The messages that `stream` holds under `sequences`; what it does not hold is absent from the result.

    Raises BusUnreachableError when nothing comes for the bus's request timeout, BusRefusedError when the server refuses.
    """
    wanted, found = set(sequences), dict[int, Msg]()
    room, clock = asyncio.Semaphore(_PARALLEL), asyncio.get_running_loop().time
    progress_at = clock()
    async with _Replies(bus, stream).open() as replies:
        while missing := sorted(wanted - found.keys()):
            answers = await asyncio.gather(*(replies.read(run, room) for run in runs(missing)))
            before = len(found)
            for messages, _ in answers:
                found |= {sequence: message for sequence, message in messages.items() if sequence in wanted}
            if len(found) > before:
                progress_at = clock()
            elif all(whole for _, whole in answers):
                break
            elif clock() - progress_at > bus.timeout_s:
                raise BusUnreachableError(f"{stream} gave none of {len(missing)} messages within {bus.timeout_s:g} s")
    return found


def runs(sequences: Sequence[int]) -> list[range]:
    """Sorted sequences as ranges that hold them all, joined over small gaps and cut at _MOST_MESSAGES."""
    found: list[range] = []
    for sequence in sequences:
        last = found[-1] if found else None
        if last is not None and sequence - last.stop <= _SLACK and sequence - last.start < _MOST_MESSAGES:
            found[-1] = range(last.start, sequence + 1)
        else:
            found.append(range(sequence, sequence + 1))
    return found


class _Request:
    """One batch request: its messages until the server's end mark."""

    def __init__(self) -> None:
        self.messages: dict[int, Msg] = {}
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self.messages[int(headers["Nats-Sequence"])] = message
        elif not self.ended.done():
            self.ended.set_result(status if status in _ENDS else f"{status}: {headers.get('Description', '')}")


class _Replies:
    """The answers of several requests, told apart by the last token of their reply subject."""

    def __init__(self, bus: Bus, stream: str) -> None:
        self._bus = bus
        self._subject = f"$JS.API.DIRECT.GET.{stream}"
        self._prefix = bus.client.new_inbox() + "."
        self._tokens = itertools.count()
        self._requests: dict[str, _Request] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[_Replies]:
        subscription = await self._bus.subscribe(self._prefix + "*", self._on_message)
        try:
            yield self
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def _on_message(self, message: Msg) -> None:
        request = self._requests.get(message.subject[len(self._prefix) :])
        if request is not None:
            request.take(message)

    async def read(self, run: range, room: asyncio.Semaphore) -> tuple[dict[int, Msg], bool]:
        """(messages by sequence, whether the server said that these are all that it sends for this request)."""
        async with room:
            token, request = str(next(self._tokens)), _Request()
            self._requests[token] = request
            try:
                whole = await self._ask(run, token, request)
            finally:
                del self._requests[token]
            return request.messages, whole

    async def _ask(self, run: range, token: str, request: _Request) -> bool:
        body = orjson.dumps({"seq": run.start, "batch": len(run), "max_bytes": _MOST_BYTES})
        restored = asyncio.ensure_future(self._bus.reconnections().wait())
        try:
            await self._bus.client.publish(self._subject, body, reply=self._prefix + token)
            await asyncio.wait(
                (request.ended, restored), timeout=self._bus.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        except nats.errors.Error as error:
            raise BusUnreachableError(f"{self._subject} cannot be asked: {error}") from error
        finally:
            restored.cancel()
        if not request.ended.done():
            if not restored.done():
                raise BusUnreachableError(f"no answer from {self._subject} within {self._bus.timeout_s:g} s")
            return False
        status = request.ended.result()
        if status.startswith(_UNREADY):
            await asyncio.sleep(_UNREADY_S)  # no event says when a server that is back serves its streams again
        elif status not in _ENDS:
            raise BusRefusedError(f"{self._subject} from {run.start} was refused: {status}")
        return status in _ENDS
