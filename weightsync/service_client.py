"""Calls to a checkpoint service, as publishers and receivers make them: named errors, a deadline on each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec

from physarum.weightsync.digest import Bytes, verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ChunksAbsentError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.manifest import Manifest, decode_manifest, encode_manifest

DEFAULT_TIMEOUT_S: Final = 30.0


class _Refusal(msgspec.Struct):
    error: str = ""
    missing: list[str] = []


class CheckpointClient:
    """Speaks to the service at `url`. `timeout_s` bounds each call; the session is the caller's."""

    def __init__(
        self, url: str, token: str | None, session: aiohttp.ClientSession, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def missing(self, digests: Sequence[str]) -> list[str]:
        answer = await self._call("POST", "/v1/missing", msgspec.json.encode(digests))
        return msgspec.json.decode(answer, type=list[str])

    async def put_chunk(self, digest: str, data: Bytes) -> None:
        await self._call("PUT", f"/v1/chunks/{digest}", data)

    async def get_chunk(self, digest: str, size: int) -> bytes:
        """The verified bytes. Raises ChunkMissingError, ChunkAlteredError."""
        try:
            data = await self._call("GET", f"/v1/chunks/{digest}", largest=size)
        except ServiceRefusedError as error:
            if error.status != 404:
                raise
            raise ChunkMissingError(f"{self.url} does not hold chunk {digest}") from error
        if len(data) != size:
            more = "more than " if len(data) > size else ""
            raise ChunkAlteredError(
                f"chunk {digest} from {self.url} is {more}{min(len(data), size)} bytes, expected {size}"
            )
        verify(data, digest, f"chunk from {self.url}")
        return data

    async def put_manifest(self, manifest: Manifest) -> None:
        """Raises ChunksAbsentError when chunks must be sent (again), else ServiceRefusedError."""
        await self._call("PUT", f"/v1/manifests/{manifest.label}", encode_manifest(manifest))

    async def hold(self, manifest: Manifest, name: str) -> bool:
        """Whether the service took over the file `name` of its host's area as this version; False: it is not there."""
        try:
            await self._call("PUT", f"/v1/held/{manifest.label}?name={name}", encode_manifest(manifest))
        except ServiceRefusedError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def get_manifest(self, label: str) -> Manifest:
        return decode_manifest(await self._call("GET", f"/v1/manifests/{label}"))

    async def _call(self, method: str, path: str, body: Bytes | None = None, largest: int | None = None) -> bytes:
        where = f"{method} {self.url}{path}"
        try:
            async with self.session.request(
                method, self.url + path, data=body, headers=self._headers, timeout=self._timeout
            ) as response:
                # One byte more than expected shows that there is more; the rest is never read into memory.
                reading = response.content.read(-1) if largest is None or response.status >= 400 else None
                data = await (reading or _at_most(response.content, largest or 0))
        except TimeoutError as error:
            raise ServiceUnreachableError(f"{where} had no answer within {self._timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise ServiceUnreachableError(f"{where} failed: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refused(where, response.status, data)
        return data


async def _at_most(content: aiohttp.StreamReader, size: int) -> bytes:
    parts: list[bytes] = []
    held = 0
    async for part in content.iter_any():
        parts.append(part)
        held += len(part)
        if held > size:
            break
    return b"".join(parts)


def _refused(where: str, status: int, body: bytes) -> ServiceRefusedError | ChunksAbsentError:
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal(error=body.decode(errors="replace")[:500])
    if refusal.missing:
        return ChunksAbsentError(refusal.error, refusal.missing)
    return ServiceRefusedError(f"{where} answered {status}: {refusal.error}", status, refusal.error)
