"""Pull requests on a JetStream consumer: one request, its messages, its end.

A request ends by its messages, by the server's status, by its own expiry, or at once when the connection was replaced
(a request outstanding on the old connection is never answered). The server delivers under the stream's subject, so
messages cannot be told apart by request: they share one queue, and a message that comes late (after its request was
given up or cancelled) is simply the next fetch's first. None is dropped, since each is leased to us.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Final

import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError

_log = logging.getLogger(__name__)

_GRACE_S: Final = 1.0
# 404 nothing there and 408 expired end a request; 409 (consumer or leadership changed) and 503 (no consumer, yet) say
# that asking again at once would be answered the same.
_ENDS: Final = ("404", "408")
_UNREADY: Final = ("409", "503")
_UNREADY_S: Final = 0.2


class Puller:
    """Fetches from one consumer; one fetch at a time (a second caller waits for the first)."""

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self._bus = bus
        self._consumer = f"{stream}/{consumer}"
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._prefix = bus.client.new_inbox() + "."
        self._tokens = itertools.count()
        self._messages: deque[Msg] = deque()
        self._ended: dict[str, Msg] = {}
        self._arrival = asyncio.Event()
        self._turn = asyncio.Lock()
        self._subscription: Subscription | None = None

    async def start(self) -> Puller:
        self._subscription = await self._bus.subscribe(self._prefix + "*", self._on_message)
        return self

    async def stop(self) -> list[Msg]:
        """Ends the subscription; returns what was delivered and not fetched, for the caller to give back."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._bus.client.is_closed:
            await subscription.unsubscribe()
        left, self._messages = list(self._messages), deque()
        return left

    async def fetch(self, batch: int, wait_s: float) -> list[Msg]:
        """Up to `batch` messages: what is there at once, else the first to come within `wait_s`; may be empty.

        A cancelled fetch loses nothing: what it had received is the next fetch's.
        """
        async with self._turn:
            if len(self._messages) < batch and (batch > 1 or wait_s <= 0):  # for one message, waiting is asking, too
                await self._request(batch - len(self._messages), batch, None)
            if not self._messages and wait_s > 0:
                await self._request(1, 1, wait_s)
            return [self._messages.popleft() for _ in range(min(batch, len(self._messages)))]

    async def _request(self, count: int, enough: int, wait_s: float | None) -> None:
        """Asks for `count` messages; returns once `enough` wait in the queue or the request has ended."""
        reply = self._prefix + str(next(self._tokens))
        body: dict[str, object] = {"batch": count}
        body |= {"no_wait": True} if wait_s is None else {"expires": int(wait_s * 1e9)}
        broken = self._bus.reconnections()
        self._ended.clear()
        await self._bus.client.publish(self._subject, orjson.dumps(body), reply=reply)
        deadline = asyncio.get_running_loop().time() + (wait_s or 0.0) + _GRACE_S
        while len(self._messages) < enough and reply not in self._ended:
            if not await self._arrives(broken, deadline):
                return
        if reply in self._ended:
            await self._check_end(self._ended.pop(reply))

    async def _arrives(self, broken: asyncio.Event, deadline: float) -> bool:
        """Waits for the next message or status; False when the time is up or the connection was replaced."""
        self._arrival.clear()
        waits = [asyncio.create_task(self._arrival.wait()), asyncio.create_task(broken.wait())]
        timeout_s = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._arrival.is_set()

    async def _on_message(self, message: Msg) -> None:
        if _status(message) is None:
            self._messages.append(message)
        else:
            self._ended[message.subject] = message
        self._arrival.set()

    async def _check_end(self, message: Msg) -> None:
        status = _status(message)
        description = (message.headers or {}).get("Description", "no description")
        if status in _UNREADY:
            _log.info("consumer %s is not ready (status %s: %s)", self._consumer, status, description)
            await asyncio.sleep(_UNREADY_S)
        elif status not in _ENDS:
            raise BusRefusedError(f"pull request on {self._consumer} ended with status {status}: {description}")


def _status(message: Msg) -> str | None:
    return message.headers.get("Status") if message.headers and not message.data else None
