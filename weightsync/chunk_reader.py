"""Chunks from one holder straight into the memory where they belong: one connection, for one thread. Blocking.

No byte is copied between the socket and its place, and none is taken for good before it was hashed there. Where the caller
has a chunk from which it may differ little, the holder may send the difference.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from physarum.weightsync.difference import HEADER, apply_difference
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ServiceRefusedError,
    ServiceUnreachableError,
)

_LARGEST_REFUSAL: Final = 4096


@dataclass(frozen=True)
class Base:
    """A verified chunk at the same place of the version before: `width` bytes make an element."""

    digest: str
    data: memoryview
    width: int


@dataclass(frozen=True)
class Difference:
    """What a chunk came as: `data` is what differs from the chunk `base`."""

    base: str
    width: int
    data: bytes


class Reader(Protocol):
    """Whatever brings chunks of one holder, for one thread. `url` names it in messages."""

    @property
    def url(self) -> str: ...

    def read_into(self, digest: str, target: memoryview, base: Base | None = None) -> Difference | None:
        """As ChunkReader does."""

    def close(self) -> None:
        """From any thread: ends what is under way, as far as it can be."""


class ChunkReader:
    """Speaks to the holder at `url`; `timeout_s` bounds each chunk. `close`, from any thread, ends what is under way."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def read_into(self, digest: str, target: memoryview, base: Base | None = None) -> Difference | None:
        """Fills `target`, which is as long as the chunk, with its verified bytes; what they came as, if as a difference to
        `base`.

        Raises ChunkMissingError, ChunkAlteredError (`target` holds rubbish then), ServiceRefusedError,
        ServiceUnreachableError.
        """
        where = f"GET {self.url}/v1/chunks/{digest}"
        came_as = None
        try:
            response = self._asked(digest, base)
            if response.status != http.client.OK:
                raise self._refused(where, digest, response)
            if base is not None and response.getheader(HEADER) == base.digest:
                came_as = self._difference(digest, response, base, target)
            else:
                self._check_length(digest, response.length, target.nbytes)
                self._receive(response, target)
        except TimeoutError as error:
            self.close()
            raise ServiceUnreachableError(f"{where} was not answered whole within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServiceUnreachableError(f"{where} failed: {type(error).__name__} {error}") from error
        verify(target, digest, f"chunk from {self.url}")
        return came_as

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _asked(self, digest: str, base: Base | None) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        if self._connection is None:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.netloc, timeout=self._timeout_s)
        query = "" if base is None else f"?base={base.digest}&width={base.width}"
        self._connection.request("GET", f"{parts.path}/v1/chunks/{digest}{query}", headers=self._headers)
        return self._connection.getresponse()

    def _difference(
        self, digest: str, response: http.client.HTTPResponse, base: Base, target: memoryview
    ) -> Difference:
        """Never more than the chunk itself."""
        length = response.length
        if length is None or length > target.nbytes:
            self.close()
            raise ChunkAlteredError(
                f"chunk {digest} from {self.url}: a difference of {length} bytes, the chunk has {target.nbytes}"
            )
        data = bytearray(length)
        self._receive(response, memoryview(data))
        apply_difference(bytes(data), base.data, base.width, target)
        return Difference(base.digest, base.width, bytes(data))

    def _check_length(self, digest: str, found: int | None, expected: int) -> None:
        if found != expected:
            self.close()
            raise ChunkAlteredError(f"chunk {digest} from {self.url} is {found} bytes, expected {expected}")

    def _receive(self, response: http.client.HTTPResponse, target: memoryview) -> None:
        """As `readinto`, but with a deadline for the whole: a holder that trickles must not hold a thread."""
        deadline = time.monotonic() + self._timeout_s
        got = 0
        while got < target.nbytes:
            count = response.fp.readinto1(target[got:])
            if not count:
                raise http.client.IncompleteRead(b"", target.nbytes - got)
            got += count
            if time.monotonic() > deadline:
                raise TimeoutError
        response.length = 0  # all was read below the response; it closes itself, and the connection can be used again
        response.readinto(bytearray(1))

    def _refused(
        self, where: str, digest: str, response: http.client.HTTPResponse
    ) -> ChunkMissingError | ServiceRefusedError:
        status, text = response.status, response.read(_LARGEST_REFUSAL).decode(errors="replace")
        if not response.isclosed():
            self.close()  # there is more than anybody wants to read
        if status == http.client.NOT_FOUND:
            return ChunkMissingError(f"{self.url} does not hold chunk {digest}")
        return ServiceRefusedError(f"{where} answered {status}: {text}", status, text)
