"""Last-value registers: small records by key, with compare-and-set and, where the stream allows it, a time to live.

A register is a stream that keeps one message per subject; the value's sequence is its revision. Watchers listen where
the server republishes values *after* it stored them: on the register's own subject they would also hear refused
compare-and-sets, and could read the old value between a message's arrival and its storage, and then wait for ever.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec
from nats.aio.msg import Msg

from physarum.bus import names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of
from physarum.bus.errors import ForeignRunError, NotStoredError, WrongSequenceError
from physarum.bus.names import RUN_HEADER, StreamKey
from physarum.bus.publisher import Publisher

T = TypeVar("T", bound=msgspec.Struct)


class Entry(Generic[T]):
    """A value and its revision; revision 0 means that the key has no value."""

    def __init__(self, value: T | None, revision: int) -> None:
        self.value = value
        self.revision = revision


class Register(Generic[T]):
    """One kind of record in one register stream."""

    def __init__(self, bus: Bus, publisher: Publisher, key: StreamKey, kind: type[T]) -> None:
        self._bus, self._publisher, self._key, self._kind = bus, publisher, key, kind
        self._stream = names.stream(bus.run, key)

    def subject(self, *tokens: str) -> str:
        return names.subject(self._bus.run, self._key, *tokens)

    async def get(self, *tokens: str) -> Entry[T]:
        """The current value, or Entry(None, 0). Read on the stream's leader: a follower may not have it yet.

        Raises ForeignRunError when another run wrote it.
        """
        try:
            reply = await self._bus.api(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": self.subject(*tokens)})
        except NotStoredError:
            return Entry(None, 0)
        message = reply["message"]
        self._refuse_foreign(message)
        data = base64.b64decode(message.get("data", ""))
        # A message without a body marks a deletion; the next writer must still name its revision.
        return Entry(decode(data, self._kind) if data else None, int(message["seq"]))

    async def entries(self, *prefix: str) -> list[T]:
        """Every value whose key begins with `prefix`."""
        found = await last_of(self._bus, self._stream, self.subject(*prefix) + ".>")
        return [
            decode(message.data, self._kind)
            for message in found
            if message.data and self._bus.accept(message.headers, RUN_HEADER)
        ]

    def _refuse_foreign(self, stored: dict[str, Any]) -> None:
        headers = _headers(base64.b64decode(stored.get("hdrs", "")))
        if not self._bus.accept(headers, RUN_HEADER):
            raise ForeignRunError(
                f"{stored['subject']} was written by run {headers.get(RUN_HEADER)!r}, expected {self._bus.run!r}: end the"
                " process that uses this run's subjects, and give its run a name of its own"
            )

    async def put(self, value: T, *tokens: str, ttl_s: int | None = None, deadline_s: float | None = 10.0) -> int:
        """Writes without condition and returns the revision."""
        ack = await self._publisher.publish(self.subject(*tokens), encode(value), ttl_s=ttl_s, deadline_s=deadline_s)
        return ack.seq

    async def compare_and_set(self, value: T, revision: int, *tokens: str, ttl_s: int | None = None) -> int:
        """Writes only over `revision` (0: only where nothing is). Raises WrongSequenceError when somebody was first."""
        ack = await self._publisher.publish(
            self.subject(*tokens), encode(value), expect_last_subject_sequence=revision, ttl_s=ttl_s, deadline_s=10.0
        )
        return ack.seq

    async def clear(self, revision: int, *tokens: str, ttl_s: int = 1) -> None:
        """Removes the value of `revision`; does nothing when another was written since."""
        with contextlib.suppress(WrongSequenceError):
            await self._publisher.publish(
                self.subject(*tokens), b"", expect_last_subject_sequence=revision, ttl_s=ttl_s, deadline_s=5.0
            )

    @contextlib.asynccontextmanager
    async def watch(self, *tokens: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever the key may have changed (also by a reconnection); clear it, then `get`."""
        changed = asyncio.Event()

        async def hint(message: Msg) -> None:
            changed.set()

        subject = names.changed_subject(self._bus.run, self._key, *tokens)
        subscription = await self._bus.subscribe(subject, hint)
        relay = asyncio.create_task(_set_on_reconnect(self._bus, changed), name=f"watch {self._stream}")
        try:
            changed.set()
            yield changed
        finally:
            relay.cancel()
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()


def _headers(block: bytes) -> dict[str, str]:
    """A stored header block: the protocol's line, then `Name: value` lines."""
    lines = (line.partition(":") for line in block.decode().split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in lines}


async def _set_on_reconnect(bus: Bus, changed: asyncio.Event) -> None:
    while True:
        await bus.reconnections().wait()
        changed.set()
