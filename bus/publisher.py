"""Windowed JetStream publishing that always ends: stored, refused by name, or out of time.

nats-py's `publish_async` futures never finish after a server restart (nats.py #985), so every attempt here has its own
timeout, ends at once when its connection breaks, and is repeated under the same message id until the deadline. The
server compares sequences before it looks at message ids: when a receipt was lost, the repetition of a compare-and-set is
refused because of its own first attempt, so a refusal is believed only after a look at who wrote. A full stream is
back-pressure, not an error: the publisher waits and the window fills, which holds its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import uuid
from typing import Any, Final

import msgspec
import nats.errors
import orjson
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.connection import Bus, refused
from physarum.bus.errors import (
    BusError,
    BusRefusedError,
    BusUnreachableError,
    PublishTimeoutError,
    StreamFullError,
    WrongSequenceError,
)
from physarum.bus.gate import Gate, Turn
from physarum.bus.names import MESSAGE_ID_HEADER, RUN_HEADER

_log = logging.getLogger(__name__)

_EXPECT_LAST: Final = "Nats-Expected-Last-Sequence"
_EXPECT_LAST_OF_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence"
_FULL: Final = 10077
_ACK_TIMEOUT_S: Final = 3.0
_BACKOFF_MAX_S: Final = 1.0


class PubAck(msgspec.Struct, frozen=True):
    """The stream's receipt. `duplicate`: the message id was already stored; `seq` is then the first one's."""

    seq: int
    duplicate: bool = False


class PublishStats(msgspec.Struct):
    """Counters since the start of this publisher."""

    published: int = 0
    retried: int = 0
    duplicates: int = 0
    waited_full: int = 0


class _NoAnswer(BusError):
    """This attempt got no acknowledgement; the next one carries the same message id."""


class Publisher:
    """At most `window_messages` and `window_bytes` unacknowledged; a single larger message goes alone."""

    def __init__(self, bus: Bus, window_messages: int = 256, window_bytes: int = 32 << 20) -> None:
        self._bus = bus
        self._entrance = asyncio.Lock()
        self._room = asyncio.Event()
        self._max_messages, self._max_bytes = window_messages, window_bytes
        self._messages = self._bytes = 0
        self._prefix = bus.client.new_inbox() + "."
        self._tokens = itertools.count()
        self._waiting: dict[str, asyncio.Future[PubAck]] = {}
        self._gates: dict[str, Gate] = {}
        self.stats = PublishStats()

    async def start(self) -> Publisher:
        await self._bus.subscribe(self._prefix + "*", self._on_reply)
        self._bus.on_disconnect(self._retry_all)
        return self

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
        deadline_s: float | None = None,
        expect_last_sequence: int | None = None,
        expect_last_subject_sequence: int | None = None,
        ttl_s: int | None = None,
        wait_when_full: bool = True,
    ) -> PubAck:
        """Stores one message and returns its receipt.

        Without `message_id` a repeated attempt may be stored twice, so only messages that may repeat go without one.
        `deadline_s` None waits as long as the bus is away or full: for work that must not be lost.
        Raises StreamFullError, WrongSequenceError, BusRefusedError or PublishTimeoutError.
        """
        conditional = expect_last_sequence is not None or expect_last_subject_sequence is not None
        if message_id is None and conditional:
            message_id = uuid.uuid4().hex
        full = {RUN_HEADER: self._bus.run, **(headers or {})}
        if message_id is not None:
            full[MESSAGE_ID_HEADER] = message_id
        if expect_last_sequence is not None:
            full[_EXPECT_LAST] = str(expect_last_sequence)
        if expect_last_subject_sequence is not None:
            full[_EXPECT_LAST_OF_SUBJECT] = str(expect_last_subject_sequence)
        if ttl_s is not None:
            full["Nats-TTL"] = f"{ttl_s}s"
        try:
            async with asyncio.timeout(deadline_s):
                return await self._in_window(subject, data, full, wait_when_full)
        except TimeoutError as error:
            raise PublishTimeoutError(
                f"{subject} was not acknowledged within {deadline_s} s; it may or may not be stored"
                f" (message id {message_id}); publish it again under the same id"
            ) from error

    async def _in_window(self, subject: str, data: bytes, headers: dict[str, str], wait_when_full: bool) -> PubAck:
        await self._enter(len(data))
        gate = self._gates.setdefault(".".join(subject.split(".")[:3]), Gate())
        try:
            with gate.turn() as turn:
                return await self._until_stored(subject, data, headers, gate, turn, wait_when_full)
        finally:
            self._leave(len(data))

    async def _until_stored(
        self, subject: str, data: bytes, headers: dict[str, str], gate: Gate, turn: Turn, wait_when_full: bool
    ) -> PubAck:
        for attempt in itertools.count():
            if wait_when_full:
                await gate.wait(turn)
            try:
                ack = await self._attempt_once(subject, data, headers)
                self.stats.published += 1
                self.stats.duplicates += ack.duplicate
                return ack
            except StreamFullError as error:
                if not wait_when_full:
                    raise
                self.stats.waited_full += 1
                if attempt == 0:
                    _log.info("publishing to %s waits: %s", subject, error)
                await self._tell_full(subject)
                if not gate.full(turn):
                    continue
            except _NoAnswer as error:
                self.stats.retried += 1
                _log.debug("publishing %s again: %s", subject, error)
            await asyncio.sleep(_backoff_s(attempt))
        raise AssertionError("unreachable: the loop above only ends by return or raise")

    async def _tell_full(self, subject: str) -> None:
        """Says that somebody waits for room, at each attempt: whoever can make some need not look by itself."""
        with contextlib.suppress(nats.errors.Error):
            await self._bus.client.publish(names.full_subject(self._bus.run, subject.split(".")[2]))

    async def _attempt_once(self, subject: str, data: bytes, headers: dict[str, str]) -> PubAck:
        try:
            return await self._attempt(subject, data, headers)
        except WrongSequenceError:
            own = await self._own(subject, headers)
            if own is None:
                raise
            return own

    async def _own(self, subject: str, headers: dict[str, str]) -> PubAck | None:
        """The receipt of an earlier attempt of the same message, if that is what stands where this one should go."""
        stream = f"{self._bus.run}_{subject.split('.')[2].upper()}"
        expected = headers.get(_EXPECT_LAST)
        query = {"last_by_subj": subject} if expected is None else {"seq": int(expected) + 1}
        try:
            found = await self._bus.request(f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(query), repeatable=True)
        except BusUnreachableError as error:
            raise _NoAnswer("whose write came first could not be read") from error
        stored = found.headers or {}
        if stored.get(MESSAGE_ID_HEADER) != headers[MESSAGE_ID_HEADER]:
            return None
        return PubAck(int(stored["Nats-Sequence"]), duplicate=True)

    async def _attempt(self, subject: str, data: bytes, headers: dict[str, str]) -> PubAck:
        token = str(next(self._tokens))
        answer: asyncio.Future[PubAck] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        try:
            await self._bus.client.publish(subject, data, reply=self._prefix + token, headers=headers)
            async with asyncio.timeout(_ACK_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            denied = self._bus.denied(subject)
            if denied is not None:
                raise BusRefusedError(f"publishing to {subject} was refused: {denied}; check the account") from error
            raise _NoAnswer(f"no acknowledgement within {_ACK_TIMEOUT_S:g} s") from error
        except nats.errors.OutboundBufferLimitError as error:
            raise _NoAnswer("the outbound buffer is full while the server is away") from error
        except nats.errors.MaxPayloadError as error:
            raise BusRefusedError(
                f"{len(data)} bytes for {subject} are above the server's max_payload of {self._bus.client.max_payload};"
                " send them by reference"
            ) from error
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise BusUnreachableError(f"{subject} cannot be published: the connection was closed") from error
        finally:
            self._waiting.pop(token, None)

    def _retry_all(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_NoAnswer("the connection broke"))

    async def _on_reply(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject[len(self._prefix) :])
        if answer is None or answer.done():
            return
        if message.headers and message.headers.get("Status") == "503":
            answer.set_exception(_NoAnswer("no stream listens on the subject (yet)"))
            return
        reply: dict[str, Any] = orjson.loads(message.data)
        error = reply.get("error")
        if error is None:
            answer.set_result(PubAck(int(reply["seq"]), bool(reply.get("duplicate", False))))
        elif error.get("err_code") == _FULL:
            answer.set_exception(StreamFullError(f"{error.get('description')} (code {_FULL}); the consumer is behind"))
        else:
            answer.set_exception(refused("publish", error))

    async def _enter(self, size: int) -> None:
        """First come, first served: a large message is not overtaken for ever by small ones."""
        async with self._entrance:
            self._room.clear()
            while not self._fits(size):
                await self._room.wait()
                self._room.clear()
            self._messages += 1
            self._bytes += size

    def _fits(self, size: int) -> bool:
        return self._messages < self._max_messages and (self._bytes + size <= self._max_bytes or self._messages == 0)

    def _leave(self, size: int) -> None:
        self._messages -= 1
        self._bytes -= size
        self._room.set()


def _backoff_s(attempt: int) -> float:
    """Full jitter: the wait between repetitions of a refused or unanswered publish."""
    return random.uniform(0.02, min(_BACKOFF_MAX_S, 0.05 * 2 ** min(attempt, 10)))
