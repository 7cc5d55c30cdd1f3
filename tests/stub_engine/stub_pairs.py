"""KV between two stubs: the prefill server keeps, for each room, the digest of the weights that read the prompt.

decode server --GET /kv/ROOM--> bootstrap port of the prefill server, answered when the prompt has been read
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

_TIMEOUT_S = 60.0


class KeyValues:
    """Of a prefill server; each room is taken once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._rooms: dict[int, asyncio.Future[str]] = defaultdict(lambda: asyncio.get_running_loop().create_future())

    def put(self, room: int, weights: str) -> None:
        if not self._rooms[room].done():
            self._rooms[room].set_result(weights)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        application = web.Application()
        application.router.add_get("/kv/{room}", self._get)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True).start()
        yield
        await runner.cleanup()

    async def _get(self, http: web.Request) -> web.Response:
        room = int(http.match_info["room"])
        weights = await self._rooms[room]
        del self._rooms[room]
        return web.Response(text=weights)


async def fetch(body: dict[str, Any]) -> str:
    """What a decode server asks for, by what the request names."""
    url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/kv/{body['bootstrap_room']}"
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
        return await answer.text()
