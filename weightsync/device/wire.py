"""Messages between an actor and its device agent: over a socket pair on one host, never further.

    4 bytes little-endian length, then that many bytes of JSON; file descriptors travel beside the first byte (SCM_RIGHTS)

Stands alone: standard library only, for the engine's Python runs it too.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 4


def send(connection: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Raises OSError, TimeoutError as the socket does."""
    data = json.dumps(message).encode()
    head = len(data).to_bytes(_LENGTH_BYTES, "little")
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and its descriptors, which are the caller's to close. Raises EOFError when the other side is gone."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    while 0 < len(head) < _LENGTH_BYTES:
        head += _some(connection, _LENGTH_BYTES - len(head))
    if not head:
        raise EOFError("the other side is gone")
    left, parts = int.from_bytes(head, "little"), []
    while left:
        parts.append(_some(connection, left))
        left -= len(parts[-1])
    message: dict[str, Any] = json.loads(b"".join(parts))
    return message, descriptors


def _some(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count)
    if not data:
        raise EOFError("the other side is gone, in the middle of a message")
    return data
