"""The key of engines that other machines reach: made of the run's token, sent with each request to them and with no other.

It is not the token itself, because SGLang writes the arguments of a server into its log.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse

_PURPOSE: Final = b"physarum engines"


def engine_key(token: str) -> str:
    """HMAC-SHA256 of the token, 64 hexadecimal digits."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()


def bearer(key: str | None) -> Mapping[str, str]:
    """The header that carries a key; none without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def keyed(key: str, strangers: Collection[str]) -> ClientMiddlewareType:
    """Adds the key to each request but those to `strangers`, URLs of servers that are somebody else's."""
    others, headers = {_place(url) for url in strangers}, bearer(key)

    async def add(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        if (request.url.host, request.url.port) not in others:
            request.headers.update(headers)
        return await handler(request)

    return add


def _place(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
