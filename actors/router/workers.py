"""Which engines a router knows, kept equal to those that take requests.

Invariant: only what the router accepted counts as told, so what failed is tried again; an engine that came back under another
URL is another engine. POST /workers answers before the router has looked at the engine: it takes traffic a moment later.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0


class _Accepted(msgspec.Struct):
    worker_id: str


class Workers:
    """Of the router at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._told: dict[str, str] = {}

    @property
    def urls(self) -> set[str]:
        """Engines that the router was told of."""
        return set(self._told)

    async def become(self, wanted: set[str]) -> bool:
        """Tells the router what changed; False: something failed, and is to be tried again."""
        whole = True
        for url in sorted(self._told.keys() - wanted):
            whole &= await self._remove(url)
        for url in sorted(wanted - self._told.keys()):
            whole &= await self._add(url)
        return whole

    async def _add(self, url: str) -> bool:
        body = await self._ask("POST", "/workers", {"url": url})
        if body is None:
            return False
        try:
            self._told[url] = msgspec.json.decode(body, type=_Accepted).worker_id
        except msgspec.MsgspecError as error:
            _log.error("the router accepted %s and named no worker: %s", url, error)
            return False
        return True

    async def _remove(self, url: str) -> bool:
        if await self._ask("DELETE", f"/workers/{self._told[url]}") is None:
            return False
        del self._told[url]
        return True

    async def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> bytes | None:
        """The answer; None: it was refused or did not come, as the log says. What is gone already is removed."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("%s %s of the router failed: %r", method, path, error)
            return None
        gone = method == "DELETE" and response.status == HTTPStatus.NOT_FOUND
        if response.status >= HTTPStatus.BAD_REQUEST and not gone:
            _log.warning("the router answered %s %s with %d: %s", method, path, response.status, answer[:300])
            return None
        return answer
