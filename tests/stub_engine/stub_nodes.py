"""Nodes of one stub: node 0 waits until the others have connected; they answer /health, as SGLang's further nodes do.

Nobody ends because another has: a rank that waits for one that is gone may hang, so whoever started them must see to it.
"""

from __future__ import annotations

import socket
import time

from aiohttp import web

_PATIENCE_S = 60.0


def meet(nodes: int, rank: int, address: str) -> list[socket.socket]:
    """The connections between them."""
    if nodes == 1:
        return []
    host, _, port = address.rpartition(":")
    if rank:
        return [_connected(host, int(port), rank)]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()
        listener.settimeout(_PATIENCE_S)
        found = [listener.accept()[0] for _ in range(nodes - 1)]
    ranks = sorted(one.recv(1)[0] for one in found)
    assert ranks == list(range(1, nodes)), f"ranks {ranks}"
    return found


def _connected(host: str, port: int, rank: int) -> socket.socket:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            connection.sendall(bytes([rank]))
            return connection


def only_health() -> web.Application:
    """What a further node, or an encoder, answers."""

    async def health(http: web.Request) -> web.Response:
        return web.Response()

    application = web.Application()
    application.router.add_get("/health", health)
    return application
