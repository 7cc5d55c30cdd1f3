"""Work queues: a message is leased, held by in-progress heartbeats, and ends as acknowledged, returned or dead.

Invariant: a delivery that this process took is ended exactly once by it, or comes back to somebody after `ack_wait`.
Redelivery is bounded here: the delivery after the last allowed one is moved to DEAD with its reason, then removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats.errors
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.claims import ClaimBook
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.names import RUN_HEADER, StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.pull import Puller

_log = logging.getLogger(__name__)


class DeadLetter(msgspec.Struct, kw_only=True):
    """What could not be processed: where it was, why it ended, how often it was tried, and its bytes.

    `final`: whoever tries it again comes to the same end, so that nobody asks for another one in its place.
    """

    stream: str
    subject: str
    sequence: int
    key: str
    reason: str
    deliveries: int
    worker: str
    at: float
    headers: dict[str, str]
    body: bytes
    final: bool = False


class Delivery:
    """One leased message. End it by `ack`, `retry` or `bury`; until then `WorkQueue` keeps its lease alive."""

    def __init__(self, queue: WorkQueue, message: Msg) -> None:
        self._queue = queue
        self.message = message
        self.data = message.data
        self.headers: dict[str, str] = dict(message.headers or {})
        self.sequence = message.metadata.sequence.stream
        self.deliveries = message.metadata.num_delivered or 1

    async def ack(self) -> None:
        """Removes the message for good; confirmed by the server, so a lost acknowledgement is seen (and logged)."""
        try:
            await self._queue.bus.request(self.message.reply, Msg.Ack.Ack, repeatable=True)
        except BusError as error:
            _log.warning("acknowledgement of %s #%d not confirmed: %s", self._queue.stream, self.sequence, error)
        finally:
            self._queue.release(self)

    async def retry(self, reason: str, delay_s: float = 1.0) -> None:
        """Returns the message for another try, or buries it when this was the last allowed one."""
        if self.deliveries >= self._queue.max_deliver:
            await self.bury(reason)
            return
        _log.warning("%s #%d returned (try %d): %s", self._queue.stream, self.sequence, self.deliveries, reason)
        await self.give_back(delay_s)

    async def bury(self, reason: str, *, final: bool = False) -> None:
        """Moves the message to DEAD with its reason, then removes it. `final`: as DeadLetter has it."""
        await self._queue.bury(self, reason, final=final)
        await self.ack()

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Ends this process's lease: the message is delivered again after `delay_s`, at the latest after `ack_wait`."""
        self._queue.release(self)
        try:
            await self.message.nak(delay=delay_s)
        except nats.errors.Error as error:
            _log.warning("%s #%d not given back, it waits for ack_wait: %r", self._queue.stream, self.sequence, error)

    async def extend(self) -> None:
        """Tells the server that this message is still being worked on."""
        try:
            await self.message.in_progress()
        except nats.errors.Error as error:
            _log.warning("lease of %s #%d not extended: %r", self._queue.stream, self.sequence, error)


class WorkQueue:
    """A consumer of a work-queue stream, shared by all workers of a role."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        key: StreamKey,
        durable: str,
        *,
        worker: str,
        ack_wait_s: float,
        max_deliver: int,
        claims: ClaimBook | None = None,
    ) -> None:
        self.bus = bus
        self._claims = claims
        self.stream = names.stream(bus.run, key)
        self.max_deliver = max_deliver
        self._publisher = publisher
        self._worker = worker
        self._ack_wait_s = ack_wait_s
        self._puller = Puller(bus, self.stream, durable)
        self._held: set[Delivery] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[WorkQueue]:
        """Subscribes and keeps the leases of held deliveries alive; the end of the block gives back what is not ended."""
        await self._puller.start()
        keeper = asyncio.create_task(self._keep_leases(), name=f"leases of {self.stream}")
        try:
            yield self
        finally:
            keeper.cancel()
            await self.stop()
            if not self.bus.client.is_closed:
                for delivery in tuple(self._held):
                    await delivery.give_back()

    async def stop(self) -> None:
        """Leases nothing more, gives back what nobody fetched; what was fetched stays leased until it is ended."""
        left = [Delivery(self, message) for message in await self._puller.stop()]
        if not self.bus.client.is_closed:
            for delivery in left:
                await delivery.give_back()

    async def fetch(self, batch: int, wait_s: float) -> list[Delivery]:
        """Leases up to `batch` messages. Foreign runs' messages and those out of tries are buried, not returned.

        A fetch that is cancelled or fails gives back what it had leased.
        """
        taken = [Delivery(self, message) for message in await self._puller.fetch(batch, wait_s)]
        self._held.update(taken)
        if self._claims is not None:
            self._claims.add(delivery.message.reply for delivery in taken)
        try:
            return [delivery for delivery in taken if await self._admitted(delivery)]
        except (asyncio.CancelledError, BusError):
            for delivery in self._held.intersection(taken):
                await delivery.give_back()
            raise

    async def _admitted(self, delivery: Delivery) -> bool:
        if not self.bus.accept(delivery.headers, RUN_HEADER):
            await delivery.bury(f"message of run {delivery.headers.get(RUN_HEADER)!r} in run {self.bus.run!r}")
            return False
        if delivery.deliveries > self.max_deliver:
            await delivery.bury(f"{delivery.deliveries - 1} deliveries ended without an answer (worker died or hung)")
            return False
        return True

    @property
    def held(self) -> int:
        return len(self._held)

    def release(self, delivery: Delivery) -> None:
        self._held.discard(delivery)
        if self._claims is not None:
            self._claims.discard(delivery.message.reply)

    async def bury(self, delivery: Delivery, reason: str, *, final: bool = False) -> None:
        letter = DeadLetter(
            stream=self.stream,
            subject=delivery.message.subject,
            sequence=delivery.sequence,
            key=delivery.headers.get(names.MESSAGE_ID_HEADER, ""),
            reason=reason,
            deliveries=delivery.deliveries,
            worker=self._worker,
            at=time.time(),
            headers=delivery.headers,
            body=delivery.data,
            final=final,
        )
        _log.error(
            "%s #%d is dead after %d deliveries: %s", self.stream, delivery.sequence, delivery.deliveries, reason
        )
        subject = names.subject(self.bus.run, "dead", self.stream, str(delivery.sequence))
        blob = names.referenced(delivery.message.subject)
        if blob is not None:
            subject = names.by_reference(subject, blob)
        await self._publisher.publish(subject, encode(letter), message_id=f"dead/{self.stream}/{delivery.sequence}")

    async def _keep_leases(self) -> None:
        period_s = self._ack_wait_s / 3
        while True:
            await asyncio.sleep(period_s)
            for delivery in tuple(self._held):
                await delivery.extend()


def encode_headers(record: msgspec.Struct) -> str:
    """A record as one header value (JSON: NATS headers are text, and people read them with the nats tool)."""
    return msgspec.json.encode(record).decode()


def decode_headers(text: str, kind: type[Any]) -> Any:
    return msgspec.json.decode(text.encode(), type=kind)
