"""How the checkpoint role's HTTP services answer: JSON, and refusals that say why in the same form."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_answer(value: Any, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def refusal(status: int, error: str, **more: Any) -> web.Response:
    """`{"error": ...}`: what was found, what was expected and the remedy."""
    return json_answer({"error": error, **more}, status)
