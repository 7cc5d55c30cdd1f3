"""How the checkpoint role's HTTP services answer: JSON, and refusals that say why in the same form."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from physarum.bus import room

_log = logging.getLogger(__name__)

_NO_ROOM: Final = 507
"""Insufficient Storage (RFC 4918, section 11.5)."""


def json_answer(value: Any, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def refusal(status: int, error: str, **more: Any) -> web.Response:
    """`{"error": ...}`: what was found, what was expected and the remedy."""
    return json_answer({"error": error, **more}, status)


def no_room(error: OSError, what: str, folder: Path) -> web.Response:
    """The refusal of `what` where the disk of `folder` is full; any other error is raised again."""
    if not room.is_full(error):
        raise error
    text = (
        f"no room for {what}: the disk of {folder} has {room.free_bytes(folder) >> 20} MiB free. Free some there; the writer"
        " waits and goes on by itself"
    )
    _log.error("%s", text)
    return refusal(_NO_ROOM, text)
