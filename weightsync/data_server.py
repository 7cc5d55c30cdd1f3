"""Chunks from a thread of their own: a plain event loop that knows sendfile, so that no byte of a version passes through Python
and no transfer delays the actor that serves it; and tickets, by which others read them out of this host's memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Final, Protocol

from aiohttp import web

from physarum.weightsync.authentication import authentication
from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.carriers.issuing import Issuing, Versions
from physarum.weightsync.chunk_route import ChunkRoute, Chunks
from physarum.weightsync.metrics import Counters

_log = logging.getLogger(__name__)

_START_S: Final = 30.0
_END_S: Final = 10.0


class Held(Chunks, Versions, Protocol):
    """A catalogue, or what a receiver holds."""


class DataServer:
    """Serves `chunks` at `host`; `port` is the system's choice. Counts into `counters` of its own. With a `carrier` it issues
    tickets."""

    def __init__(self, chunks: Held, token: str | None, host: str, carrier: Carrier | None = None) -> None:
        self.counters = Counters()
        self.port = 0
        self._host = host
        self._app = web.Application(middlewares=[authentication(token, self.counters)])
        route = ChunkRoute(chunks, self.counters)
        issuing = Issuing(chunks, carrier)
        self._app.add_routes([web.get("/v1/chunks/{digest}", route.get), web.get("/v1/tickets/{label}", issuing.get)])
        self._app.add_routes([web.delete("/v1/tickets/{label}", issuing.give_back)])
        self._app.on_response_prepare.append(route.count_sent)
        self._app.on_cleanup.append(issuing.close)
        self._loop = asyncio.new_event_loop()  # asyncio's own, whatever the actor's is
        self._thread = threading.Thread(target=self._main, name="chunks", daemon=True)

    async def start(self) -> None:
        """Raises OSError."""
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        async with asyncio.timeout(_START_S):
            self.port = await asyncio.wrap_future(starting)

    async def close(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop)
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.wrap_future(ending)
        except TimeoutError:
            _log.warning("receivers of chunks are cut off: they had not ended within %g s", _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, _END_S)

    async def _open(self) -> int:
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=_END_S / 2)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return int(self._runner.addresses[0][1])

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
