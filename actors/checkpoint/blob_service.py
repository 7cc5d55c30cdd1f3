"""Blobs over HTTP, beside the chunks of the same service and behind the same token.

    GET  /v1/blobs/{digest}     (Range allowed), HEAD   -> the bytes, by sendfile; 404 not here
    PUT  /v1/blobs/{digest}     bytes                   -> 201 stored, 200 known, 422 digest does not match, 507 disk full
    GET  /v1/blobs                                      -> JSON: name to modification time in ns
    POST /v1/blobs/remove       JSON, as listed         -> JSON: bytes freed

Invariant: a PUT is answered only when the bytes are verified and fsynced. GET does not read what it sends (the kernel
does): who receives a blob verifies it. A name that is no digest never becomes a path (400).
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from physarum.bus import blob_removal
from physarum.bus.blobs import BlobStore, Incoming, is_digest
from physarum.bus.errors import BlobAlteredError, RecordError
from physarum.weightsync.answers import json_answer, no_room, refusal

_PIECE_BYTES: Final = 1 << 20


class BlobService:
    """The handlers of one store. A blob above `largest_bytes` is refused."""

    def __init__(self, store: BlobStore, largest_bytes: int) -> None:
        self._store = store
        self._largest_bytes = largest_bytes

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/blobs/{digest}", self.get),
            web.put("/v1/blobs/{digest}", self.put),
            web.get("/v1/blobs", self.listing),
            web.post("/v1/blobs/remove", self.remove),
        ]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answers HEAD as well."""
        digest = request.match_info["digest"]
        if not is_digest(digest):
            return _no_digest(digest)
        path = await asyncio.to_thread(self._store.find, digest)
        if path is None:
            return refusal(
                404, f"blob {digest} is not here: nothing referred to it any more, or it was stored elsewhere"
            )
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def put(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        if not is_digest(digest):
            return _no_digest(digest)
        size = request.content_length
        if size is None:
            return refusal(411, "a blob needs its Content-Length")
        if size > self._largest_bytes:
            return refusal(413, f"blob of {size} bytes; expected at most {self._largest_bytes} (blobs.largest_bytes)")
        try:
            if await asyncio.to_thread(self._store.confirm, digest):
                return web.Response(status=200)
            await self._receive(request, digest)
        except BlobAlteredError as error:
            return refusal(422, str(error))
        except OSError as error:
            return no_room(error, f"a blob of {size} bytes", self._store.folder)
        return web.Response(status=201)

    async def listing(self, request: web.Request) -> web.Response:
        return json_answer(await asyncio.to_thread(blob_removal.listing, self._store))

    async def remove(self, request: web.Request) -> web.Response:
        try:
            listed = msgspec.json.decode(await request.read(), type=dict[str, int])
            return json_answer(await asyncio.to_thread(blob_removal.remove, self._store, listed))
        except (msgspec.DecodeError, RecordError) as error:
            return refusal(400, f"expected a JSON map of what GET /v1/blobs lists: {error}")

    async def _receive(self, request: web.Request, digest: str) -> None:
        """Writes what arrives aside; a sender that is gone in the middle leaves nothing."""
        incoming = await asyncio.to_thread(Incoming, self._store, digest)
        try:
            async for piece in request.content.iter_chunked(_PIECE_BYTES):
                await asyncio.to_thread(incoming.write, piece)
            await asyncio.to_thread(incoming.commit)
        finally:
            await asyncio.to_thread(incoming.close)


def _no_digest(text: str) -> web.Response:
    return refusal(400, f"{text[:80]!r} is no digest of a blob; expected 32 lower-case hex digits")
