"""One connection to NATS, with deadlines on every request and an event for every reconnection.

Invariant: nothing awaits the server without a deadline. What was outstanding when a connection broke is never answered,
so it learns of the break at once (`on_disconnect`, `reconnections`) instead of waiting its time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import nats
import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from physarum.bus import names
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import BusRefusedError, BusUnreachableError, NotStoredError, WrongSequenceError
from physarum.bus.names import check_run

_log = logging.getLogger(__name__)

# Outbound bytes kept while the server is away; above it publishes raise and the publisher retries them.
_CLOSE_S: Final = 5.0
_INSISTENCE: Final = 20
_AGAIN_S: Final = 0.05
_PENDING_BYTES: Final = 64 << 20
_NOT_STORED: Final = 10037
_WRONG_SEQUENCE: Final = (10071, 10164)

Handler = Callable[[Msg], Awaitable[None]]


class _Client(Client):
    """nats-py's client, whose publish does not raise because the connection is just breaking."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        try:
            await super().publish(subject, payload, reply, headers)
        except (RuntimeError, ConnectionError) as error:
            # Its flusher has met the closed transport (uvloop: RuntimeError), its read loop has not yet. The message is
            # in the client's buffer and leaves with the next connection, like all that is published in between.
            _log.debug("published to %s while the connection broke: %r", subject, error)


class Bus:
    """A connected bus of one run."""

    def __init__(self, client: Client, run: str, endpoint: Endpoint) -> None:
        self.client = client
        self.run = run
        self.endpoint = endpoint
        self.timeout_s = endpoint.request_timeout_s
        self.foreign_messages = 0
        self.last_permission_error: str | None = None
        self._reconnected = asyncio.Event()
        self._broken = asyncio.Event()
        self._closing = False
        self._connected = False
        self._on_break: list[Callable[[], None]] = []
        self._echo = names.echo_subject(run, client.new_inbox().rpartition(".")[2])
        self._numbers = itertools.count()
        self._flushes: dict[str, asyncio.Future[None]] = {}

    @classmethod
    async def connect(cls, endpoint: Endpoint, run: str, name: str, deadline_s: float = 10.0) -> Bus:
        """Raises BusUnreachableError when nothing answers (or the credentials are refused) within `deadline_s`."""
        client = _Client()
        bus = cls(client, check_run(run), endpoint)
        options = bus._options(f"{run}/{name}", deadline_s)
        try:
            await _within(deadline_s, bus._begin(options))
        except (TimeoutError, OSError, nats.errors.Error) as error:
            with contextlib.suppress(OSError, nats.errors.Error):  # TimeoutError is an OSError
                await _within(_CLOSE_S, client.close())
            cause = client.last_error or error
            raise BusUnreachableError(_unreachable(endpoint, cause, bus.last_permission_error, deadline_s)) from error
        bus._connected = True
        return bus

    async def _begin(self, options: dict[str, Any]) -> None:
        await self.client.connect(**options)
        await self.client.subscribe(self._echo, cb=self._on_echo)

    def _options(self, name: str, deadline_s: float) -> dict[str, Any]:
        return {
            "servers": self.endpoint.url.split(","),
            "name": name,
            "token": self.endpoint.secret(self.endpoint.token_env),
            "user": self.endpoint.secret(self.endpoint.user_env),
            "password": self.endpoint.secret(self.endpoint.password_env),
            "tls": self.endpoint.tls(),
            "error_cb": self._on_error,
            "reconnected_cb": self._on_reconnected,
            "disconnected_cb": self._on_disconnected,
            "connect_timeout": max(1, int(deadline_s)),
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.1,
            "ping_interval": 10,
            "pending_size": _PENDING_BYTES,
            "allow_reconnect": True,
        }

    async def close(self) -> None:
        """Flushes what was published and closes; never raises because the server is already gone."""
        self._closing = True
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.client.drain()
        except (OSError, nats.errors.Error) as error:  # TimeoutError is an OSError
            _log.debug("bus connection closed without drain: %r", error)
            with contextlib.suppress(OSError):  # the client writes to a connection that may be gone
                await self.client.close()

    def reconnections(self) -> asyncio.Event:
        """The event that the next reconnection sets; take it before the request that must not outlive the connection."""
        return self._reconnected

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever a connection broke: what was sent on it and not answered never will be."""
        self._on_break.append(callback)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """A core subscription, in force on the server when this returns."""
        subscription = await self.client.subscribe(subject, cb=handler)
        try:
            await self.flush()
        except BusUnreachableError:
            await subscription.unsubscribe()
            raise
        return subscription

    async def flush(self) -> None:
        """Returns once the server has taken everything sent so far. Raises BusUnreachableError without an answer.

        A message to ourselves comes back in order with all else, whoever else listens. (A request that nobody serves
        would be left without an answer by anybody who watches all subjects. The client's own flush may not be cancelled
        or time out: the late PONG then ends its read loop, and the connection is deaf for half a minute.)
        """
        number, returned = str(next(self._numbers)), asyncio.get_running_loop().create_future()
        self._flushes[number] = returned
        try:
            async with asyncio.timeout(self.timeout_s):
                while not returned.done():
                    broken = self._broken
                    await self.client.publish(self._echo, number.encode())
                    await _first_of(returned, broken)
        except (nats.errors.Error, TimeoutError) as error:
            denied = self.denied(self._echo)
            hint = f"; the server said: {denied}" if denied else ""
            raise BusUnreachableError(f"no answer from {self._echo} within {self.timeout_s:g} s{hint}") from error
        finally:
            del self._flushes[number]

    async def _on_echo(self, message: Msg) -> None:
        returned = self._flushes.get(message.data.decode())
        if returned is not None and not returned.done():
            returned.set_result(None)

    async def request(
        self, subject: str, payload: bytes, timeout_s: float | None = None, *, repeatable: bool = False
    ) -> Msg:
        """One request, one reply. Raises BusUnreachableError (no answer) or BusRefusedError (nobody listens there).

        A `repeatable` request (a read, an acknowledgement) is sent again when the connection that carried it breaks.
        """
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    reply = await self._asked(subject, payload, deadline_s, repeatable)
                    if reply is not None:
                        return reply
        except nats.errors.NoRespondersError as error:
            raise BusRefusedError(
                f"nobody serves {subject}: the actor, the stream, or JetStream itself is not there"
            ) from error
        except nats.errors.MaxPayloadError as error:
            raise BusRefusedError(f"{len(payload)} bytes for {subject} are above the server's max_payload") from error
        except (nats.errors.Error, TimeoutError) as error:
            denied = self.denied(subject)
            hint = f"; the server said: {denied}" if denied else ""
            raise BusUnreachableError(f"no answer from {subject} within {deadline_s:g} s{hint}") from error

    async def _asked(self, subject: str, payload: bytes, timeout_s: float, repeatable: bool) -> Msg | None:
        """The reply; None when the connection broke first and the request may be sent again."""
        if not repeatable:
            return await self.client.request(subject, payload, timeout=timeout_s)
        asked = asyncio.ensure_future(self.client.request(subject, payload, timeout=timeout_s))
        broken = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait((asked, broken), return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()
            broken.cancel()

    def denied(self, subject: str) -> str | None:
        """The server's last permission error, if it was about `subject` (the client gives it in lower case)."""
        text = self.last_permission_error
        return text if text is not None and f'"{subject.lower()}"' in text.lower() else None

    async def api(self, verb: str, payload: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """A JetStream API call (`$JS.API.<verb>`). Raises WrongSequenceError or BusRefusedError with the server's words."""
        body = orjson.dumps(payload) if payload is not None else b""
        reply = orjson.loads((await self.request(f"$JS.API.{verb}", body, timeout_s, repeatable=True)).data)
        if "error" in reply:
            raise refused(verb, reply["error"])
        return reply

    def accept(self, headers: dict[str, str] | None, run_header: str) -> bool:
        """Whether a message carries this run's id; a foreign one is counted and must be refused by the caller."""
        found = (headers or {}).get(run_header)
        if found == self.run:
            return True
        self.foreign_messages += 1
        _log.warning("refused a message of run %r: this is run %r", found, self.run)
        return False

    async def _on_error(self, error: Exception) -> None:
        text = str(error)
        if "permissions violation" in text.lower() or "authorization" in text.lower():
            self.last_permission_error = text
            _log.error("the bus refused: %s; check the account's permissions for ph.%s.>", text, self.run)
        else:
            # While it is away every attempt ends here, ten a second; its loss and its return are logged once each.
            _log.log(logging.WARNING if self.client.is_connected else logging.DEBUG, "bus connection: %r", error)

    async def _on_disconnected(self) -> None:
        if not self._closing and self._connected:
            _log.warning("bus connection lost; reconnecting to %s", self.endpoint.url)
        done, self._broken = self._broken, asyncio.Event()
        done.set()
        for callback in self._on_break:
            callback()

    async def _on_reconnected(self) -> None:
        _log.warning("bus connection restored")
        done, self._reconnected = self._reconnected, asyncio.Event()
        done.set()


async def _first_of(future: asyncio.Future[None], event: asyncio.Event) -> None:
    waits = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((future, waits), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waits.cancel()


def refused(what: str, error: dict[str, Any]) -> BusRefusedError | WrongSequenceError:
    """The server's JSON error as an exception with its own words and code."""
    code, text = error.get("err_code"), error.get("description", "no description")
    if code == _NOT_STORED:
        return NotStoredError(f"{what}: {text} (code {code})")
    if code in _WRONG_SEQUENCE:
        return WrongSequenceError(f"{what}: {text} (code {code})")
    return BusRefusedError(f"{what}: {text} (code {code})")


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError after `seconds`, whatever `work` does: the client swallows a cancellation that meets it while its
    server refuses the credentials, and goes on waiting for nobody. It is cancelled again until it has ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        for _ in range(_INSISTENCE):
            if task.done():
                break
            task.cancel()
            await asyncio.wait({task}, timeout=_AGAIN_S)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _unreachable(endpoint: Endpoint, error: Exception, permission: str | None, deadline_s: float) -> str:
    reason = permission or str(error) or type(error).__name__
    return (
        f"no NATS server accepted a connection at {endpoint.url} within {deadline_s:g} s ({reason}); "
        "start one there, correct bus.url, or remove bus.url to let physarum start its own"
    )
