"""A loopback port that nobody else is given until the server that it is meant for listens on it.

Invariant: between choosing a port and the server's bind, minutes later, the port stays bound (but not listening) here,
so the kernel offers it to no one who asks for any free port. Linux lets a second socket bind and listen on it as long
as both set SO_REUSEADDR, which SGLang's HTTP server does.
"""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """Holds one port of 127.0.0.1; `close` it once the server listens."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
