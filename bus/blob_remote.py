"""A blob store on another machine, over HTTP: the client of `actors/checkpoint/blob_service.py`.

Invariant: what `get` returns was verified on arrival; when `put` returns the store has verified and fsynced the bytes.
Each call ends: what fails is asked a few times, after a pause of random length; what is silent, once; then it is named.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Final

import aiohttp
import msgspec

from physarum.bus.blobs import BlobRef, digest
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobNoRoomError,
    BlobRefusedError,
    BlobUnreachableError,
    BusError,
)

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.2
_LEAST_BYTES_PER_S: Final = 1 << 20
"""A slower network counts as none."""
_NO_ROOM: Final = 507
_CUT: Final = 422


class _SilentError(BlobUnreachableError):
    """Nothing came for the whole deadline: another store is the better next try."""


class _Refusal(msgspec.Struct):
    error: str = ""


class RemoteStore:
    """The store `identity` at `url`. `timeout_s` bounds each silence; a call as a whole has more, by the blob's size."""

    def __init__(self, identity: str, url: str, token: str | None, timeout_s: float) -> None:
        self.identity = identity
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s

    async def put(self, ref: BlobRef, data: bytes) -> None:
        """Raises BlobNoRoomError, BlobUnreachableError, BlobAlteredError (on the way, each time), BlobRefusedError."""
        await self._repeated("PUT", f"/v1/blobs/{ref.digest}", ref, data)

    async def get(self, ref: BlobRef) -> bytes:
        """Raises BlobMissingError, BlobAlteredError, BlobUnreachableError, BlobRefusedError."""
        return await self._repeated("GET", f"/v1/blobs/{ref.digest}", ref)

    async def listing(self) -> dict[str, int]:
        """As `blob_removal.listing`."""
        answer = await self._call("GET", "/v1/blobs", None, 0, None)
        return msgspec.json.decode(answer, type=dict[str, int])

    async def remove(self, listed: Mapping[str, int]) -> int:
        """As `blob_removal.remove`."""
        answer = await self._call("POST", "/v1/blobs/remove", msgspec.json.encode(listed), 0, None)
        return msgspec.json.decode(answer, type=int)

    async def _repeated(self, method: str, path: str, ref: BlobRef, body: bytes | None = None) -> bytes:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = await self._call(method, path, body, ref.size, ref.size if body is None else None)
                if body is None:
                    await self._verify(ref, answer)
                return answer
            except (BlobUnreachableError, BlobAlteredError) as error:
                if attempt == _ATTEMPTS or isinstance(error, _SilentError):
                    raise
                _log.info("trying again: %s", error)
                await asyncio.sleep(random.uniform(0, _BACKOFF_S * 2**attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _verify(self, ref: BlobRef, data: bytes) -> None:
        found = await asyncio.to_thread(digest, data)
        if found != ref.digest:
            raise BlobAlteredError(
                f"blob {ref.digest} from {self.url} has {len(data)} bytes with digest {found}, expected {ref.size} with its"
                " own: they were altered there or on the way; restore the file there, or keep more blobs.replicas"
            )

    async def _call(self, method: str, path: str, body: bytes | None, size: int, largest: int | None) -> bytes:
        """`largest`: more bytes than this are not read into memory; one more shows that there are more."""
        where = f"{method} {self.url}{path}"
        total_s = self._timeout_s + size / _LEAST_BYTES_PER_S
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=self._timeout_s, sock_read=self._timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, self.url + path, data=body) as response,
            ):
                data = await _read(response.content, largest if response.status < 400 else None)
        except TimeoutError as error:
            raise _SilentError(f"{where} had no answer within {total_s:.3g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BlobUnreachableError(f"{where} failed: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refused(where, response.status, data)
        return data


async def _read(content: aiohttp.StreamReader, largest: int | None) -> bytes:
    parts: list[bytes] = []
    held = 0
    async for part in content.iter_any():
        parts.append(part)
        held += len(part)
        if largest is not None and held > largest:
            break
    return b"".join(parts)


def _refused(where: str, status: int, body: bytes) -> BusError:
    try:
        text = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.DecodeError:
        text = body.decode(errors="replace")[:500]
    message = f"{where} answered {status}: {text}"
    if status == 404:
        return BlobMissingError(message)
    if status == _NO_ROOM:
        return BlobNoRoomError(message)
    if status == _CUT:
        return BlobAlteredError(message)
    return BlobUnreachableError(message) if status >= 500 else BlobRefusedError(message)
