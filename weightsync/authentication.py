"""Who may speak to a checkpoint service: whoever sends its token, compared in constant time."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from physarum.weightsync.answers import refusal
from physarum.weightsync.metrics import Counters


def authentication(token: str | None, counters: Counters) -> Middleware:
    """Refuses requests without `Authorization: Bearer TOKEN`; None lets everybody in."""
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if expected is not None and not hmac.compare_digest(given, expected):
            counters.unauthorized += 1
            return refusal(401, "the token is absent or wrong; send Authorization: Bearer TOKEN")
        return await handler(request)

    return authenticate
