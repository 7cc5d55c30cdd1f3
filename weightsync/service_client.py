"""Calls to a checkpoint service, as publishers and receivers make them: named errors, a deadline on each call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from physarum.weightsync.carriers.ticket import Ticket
from physarum.weightsync.digest import Bytes
from physarum.weightsync.errors import ChunksAbsentError, ServiceRefusedError, ServiceUnreachableError
from physarum.weightsync.manifest import Manifest, decode_manifest, encode_manifest

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 30.0


class _Refusal(msgspec.Struct):
    error: str = ""
    missing: list[str] = []


class _Data(msgspec.Struct):
    port: int


class CheckpointClient:
    """Speaks to the service at `url`. `timeout_s` bounds each call; the session is the caller's."""

    def __init__(
        self, url: str, token: str | None, session: aiohttp.ClientSession, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.timeout_s = timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def missing(self, digests: Sequence[str]) -> list[str]:
        answer = await self._call("POST", "/v1/missing", msgspec.json.encode(digests))
        return msgspec.json.decode(answer, type=list[str])

    async def put_chunk(self, digest: str, data: Bytes) -> None:
        await self._call("PUT", f"/v1/chunks/{digest}", data)

    async def data_url(self) -> str:
        """Where the service serves chunks by: an address for them alone, or its own."""
        try:
            answer = msgspec.json.decode(await self._call("GET", "/v1/data"), type=_Data)
        except (ServiceRefusedError, ServiceUnreachableError, msgspec.DecodeError):
            return self.url  # whoever reads there is told what is wrong, for each chunk
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, f"{parts.hostname}:{answer.port}", "", "", ""))

    async def ticket(self, label: str) -> Ticket | None:
        """By which the version can be read out of the holder's memory; None: it issues none."""
        try:
            return msgspec.json.decode(await self._call("GET", f"/v1/tickets/{label}"), type=Ticket)
        except (ServiceRefusedError, ServiceUnreachableError, msgspec.DecodeError) as error:
            _log.debug("no ticket for %s: %s", label, error)
            return None

    async def give_back(self, label: str) -> None:
        """A ticket, by which nothing is read any more. One that cannot be given back lasts until its time is over."""
        try:
            await self._call("DELETE", f"/v1/tickets/{label}")
        except (ServiceRefusedError, ServiceUnreachableError) as error:
            _log.debug("the ticket for %s is not given back: %s", label, error)

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

    async def _call(self, method: str, path: str, body: Bytes | None = None) -> bytes:
        where = f"{method} {self.url}{path}"
        try:
            async with self.session.request(
                method, self.url + path, data=body, headers=self._headers, timeout=self._timeout
            ) as response:
                data = await response.read()
        except TimeoutError as error:
            raise ServiceUnreachableError(f"{where} had no answer within {self._timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise ServiceUnreachableError(f"{where} failed: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refused(where, response.status, data)
        return data


def _refused(where: str, status: int, body: bytes) -> ServiceRefusedError | ChunksAbsentError:
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal(error=body.decode(errors="replace")[:500])
    if refusal.missing:
        return ChunksAbsentError(refusal.error, refusal.missing)
    return ServiceRefusedError(f"{where} answered {status}: {refusal.error}", status, refusal.error)
