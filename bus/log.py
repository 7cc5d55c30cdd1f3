"""Reading a log stream by sequence: in order, without gaps, from any point, also across server restarts.

No acknowledgement and no durable consumer: the reader's own cursor says what was read. Ordered consumers are not used,
since they lose messages after a slow-consumer event; a gap here is an error, never a silence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Final

import msgspec
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.batch_get import by_sequence
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError, BusRefusedError, BusUnreachableError
from physarum.bus.names import RUN_HEADER, StreamKey
from physarum.bus.pull import Puller

_log = logging.getLogger(__name__)

_INACTIVE_S: Final = 60
_BATCH: Final = 256
_TOKENS_WITH_DOMAIN: Final = 11


class LogGapError(BusError):
    """Messages that should be in the log are not: the store lost or trimmed them."""


class LogEntry(msgspec.Struct, frozen=True):
    """One stored message. `data` is empty when only headers were asked for."""

    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes


class StreamState(msgspec.Struct, frozen=True):
    """`created` identifies the incarnation: a stream that was deleted and made again has another.

    `limit_bytes`: where the stream is full; -1 without a limit."""

    first: int
    last: int
    messages: int
    bytes: int
    created: str
    limit_bytes: int


async def state(bus: Bus, key: StreamKey) -> StreamState:
    reply = await bus.api(f"STREAM.INFO.{names.stream(bus.run, key)}")
    found = reply["state"]
    return StreamState(
        first=found["first_seq"],
        last=found["last_seq"],
        messages=found["messages"],
        bytes=found["bytes"],
        created=reply["created"],
        limit_bytes=reply["config"]["max_bytes"],
    )


class LogReader:
    """Follows one log from sequence `start`. Use `batches()`; `next_sequence` is where it will read on."""

    def __init__(self, bus: Bus, key: StreamKey, start: int = 1, *, headers_only: bool = False) -> None:
        self._bus, self._key = bus, key
        self._stream = names.stream(bus.run, key)
        self._headers_only = headers_only
        self.next_sequence = max(1, start)
        self._name = ""
        self._withheld = 0
        self._replaced = bus.reconnections()

    async def batches(self, wait_s: float = 5.0) -> AsyncGenerator[list[LogEntry], None]:
        """Batches as they come, for ever; an empty batch says that nothing came within `wait_s`.

        Whoever stops reading before the end of the process closes it (contextlib.aclosing).

        Raises LogGapError when a sequence is missing, and goes on by itself after a server restart.
        """
        while True:
            puller = await self._consumer()
            try:
                async with contextlib.aclosing(self._read(puller, wait_s)) as read:
                    async for batch in read:
                        yield batch
            finally:
                await puller.stop()

    async def _read(self, puller: Puller, wait_s: float) -> AsyncGenerator[list[LogEntry], None]:
        while not self._replaced.is_set():
            messages = await puller.fetch(_BATCH, wait_s)
            entries = [self._checked(message) for message in messages]
            yield [entry for entry in entries if entry is not None]
            if not messages:
                await self._check_silence()
                if not await self._exists():
                    return

    async def _consumer(self) -> Puller:
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.next_sequence,
            "ack_policy": "none",
            "headers_only": self._headers_only,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_S * 1e9),
            "max_waiting": 8,
        }
        while True:
            restored = self._replaced = self._bus.reconnections()
            try:
                made = await self._bus.api(
                    f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
                )
                self._name = made["name"]
                return await Puller(self._bus, self._stream, self._name).start()
            except BusUnreachableError as error:
                _log.warning("log %s cannot be read now (%s); trying again", self._stream, error)
                if self._bus.client.is_connected:
                    continue
                await restored.wait()

    async def _check_silence(self) -> None:
        """Raises LogGapError when the log holds more, and twice nothing of it came: the server cannot read its store."""
        with contextlib.suppress(BusUnreachableError):
            last = (await state(self._bus, self._key)).last
            if last < self.next_sequence:
                return
            if self._withheld == self.next_sequence:
                raise LogGapError(
                    f"{self._stream}: the server has messages up to {last} and gives none from {self.next_sequence} on:"
                    " its store cannot be read there, or they were trimmed. Restore the store from a copy of the run folder"
                )
            self._withheld = self.next_sequence

    async def _exists(self) -> bool:
        try:
            await self._bus.api(f"CONSUMER.INFO.{self._stream}.{self._name}")
        except BusRefusedError:
            return False
        except BusUnreachableError:
            return False
        return True

    def _checked(self, message: Msg) -> LogEntry | None:
        sequence = _sequence_of(message)
        if sequence < self.next_sequence:
            return None  # seen before a restart made the consumer anew
        if sequence > self.next_sequence and self.next_sequence > 1:
            raise LogGapError(
                f"{self._stream}: expected sequence {self.next_sequence}, found {sequence}; messages between were trimmed"
                " or lost. Restore the store, or resume from a checkpoint whose cursor is above the gap"
            )
        self.next_sequence = sequence + 1
        headers = message.headers or {}
        if not self._bus.accept(headers, RUN_HEADER):
            return None
        return LogEntry(sequence, message.subject, headers, message.data)


def _sequence_of(message: Msg) -> int:
    """From the acknowledgement subject; nats-py's `metadata` parses dates for each message.

    $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>..., or, behind a domain, two tokens more in front.
    """
    tokens = message.reply.split(".")
    return int(tokens[5 if len(tokens) < _TOKENS_WITH_DOMAIN else 7])


async def get(bus: Bus, key: StreamKey, sequence: int) -> LogEntry:
    """One message by sequence. Raises LogGapError when it is not there."""
    stream = names.stream(bus.run, key)
    found = await bus.request(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":%d}' % sequence, repeatable=True)
    if (found.headers or {}).get("Status") == "404":
        raise _missing(stream, sequence)
    return _entry(sequence, found)


async def get_many(bus: Bus, key: StreamKey, sequences: Iterable[int]) -> list[LogEntry]:
    """Messages by sequence, in the order asked for. Raises LogGapError naming the first one that is not there."""
    stream, asked = names.stream(bus.run, key), list(sequences)
    found = await by_sequence(bus, stream, asked)
    for sequence in asked:
        if sequence not in found:
            raise _missing(stream, sequence)
    return [_entry(sequence, found[sequence]) for sequence in asked]


def _entry(sequence: int, message: Msg) -> LogEntry:
    headers = message.headers or {}
    return LogEntry(sequence, headers.get("Nats-Subject", ""), headers, message.data)


def _missing(stream: str, sequence: int) -> LogGapError:
    return LogGapError(f"{stream} has no message {sequence}: it was trimmed, or the store lost it")


async def first(bus: Bus, key: StreamKey, subject: str = ">", start: int = 1) -> LogEntry | None:
    """The first message from sequence `start` on whose subject matches `subject`; None when there is none."""
    query = b'{"seq":%d,"next_by_subj":"%b"}' % (start, subject.encode())
    message = await bus.request(f"$JS.API.DIRECT.GET.{names.stream(bus.run, key)}", query, repeatable=True)
    headers = message.headers or {}
    return None if headers.get("Status") == "404" else _entry(int(headers["Nats-Sequence"]), message)


async def scan(bus: Bus, key: StreamKey, subject: str = ">") -> list[LogEntry]:
    """Every message that a stream holds now on subjects that match, oldest first (a work queue's too), consuming none."""
    now = await state(bus, key)
    found: list[LogEntry] = []
    sequence = now.first
    while now.messages and sequence <= now.last:
        entry = await first(bus, key, subject, sequence)
        if entry is None:
            break
        found.append(entry)
        sequence = entry.sequence + 1
    return found
