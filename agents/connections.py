"""HTTP sessions with servers of the SGLang kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aiohttp

KEEPALIVE_TIMEOUT_S: Final = 3.0
"""SGLang closes idle connections after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); ours must be gone before, or a request races it, and
a POST on a closed connection is not repeated by aiohttp."""


def open_session(middlewares: Sequence[aiohttp.ClientMiddlewareType] = ()) -> aiohttp.ClientSession:
    """A session for many concurrent requests: no connection limit (slots bound them), short keep-alive."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, middlewares=middlewares)
