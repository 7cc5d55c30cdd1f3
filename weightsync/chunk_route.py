"""GET of a chunk: out of a version that is a file in memory, or out of the store; by sendfile where the event loop can.

`?base=DIGEST&width=BYTES`: whoever has that chunk is sent what differs, where that is less; the answer's header says so.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final, Protocol

from aiohttp import web

from physarum.weightsync.answers import refusal
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.difference import HEADER
from physarum.weightsync.digest import is_digest
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.metrics import Counters

_PIECE_BYTES: Final = 1 << 20
_PREFIX: Final = "/v1/chunks/"
_SEND_LIMIT_S: Final = 120.0
"""For one chunk: a receiver that takes nothing more must not keep a version from being given up."""


class Chunks(Protocol):
    """A catalogue, or what a receiver holds."""

    @property
    def store(self) -> ChunkStore | None:
        """Where the chunks are that are in no file."""

    def chunk(self, digest: str) -> tuple[HeldFile, int, int] | None:
        """(File, offset, bytes) of a chunk; None: it is in no file."""

    def difference(self, digest: str, base: str, width: int) -> bytes | None:
        """A chunk as what differs from another, elements of `width` bytes; None: not known here, or not worth it. Blocking."""


class ChunkRoute:
    """The chunks of `chunks`, from any event loop."""

    def __init__(self, chunks: Chunks, counters: Counters) -> None:
        self._chunks = chunks
        self._counters = counters

    async def get(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        different = await self._difference(digest, request)
        if different is not None:
            return different
        held = self._chunks.chunk(digest)
        if held is not None:
            file, offset, size = held
            with file.using() as is_here:
                if is_here:
                    return await self._send(request, file, offset, size)
        store = self._chunks.store
        known = store is not None and is_digest(digest)
        if store is None or not known or await asyncio.to_thread(store.size, digest) is None:
            return refusal(404, f"chunk {digest[:80]} is not here; it was given up with its version, or never came")
        return web.FileResponse(store.path(digest))

    async def _difference(self, digest: str, request: web.Request) -> web.Response | None:
        base, width = request.query.get("base"), request.query.get("width", "")
        if base is None or not is_digest(base) or not is_digest(digest) or not width.isdecimal():
            return None
        data = await asyncio.to_thread(self._chunks.difference, digest, base, int(width))
        if data is None:
            return None
        self._counters.differences_out += 1
        self._counters.bytes_out += len(data)
        return web.Response(body=data, content_type="application/octet-stream", headers={HEADER: base})

    async def count_sent(self, request: web.Request, response: web.StreamResponse) -> None:
        """A signal handler: by now the length is known, of a part as of the whole."""
        chunk = request.path.startswith(_PREFIX)
        if chunk and isinstance(response, web.FileResponse) and response.status < 300:
            self._counters.chunks_out += 1
            self._counters.bytes_out += response.content_length or 0

    async def _send(self, request: web.Request, file: HeldFile, offset: int, size: int) -> web.StreamResponse:
        """A part of a file in memory, or a range of it. Raises HTTPRequestRangeNotSatisfiable."""
        try:
            wanted = request.http_range
        except ValueError as error:
            raise web.HTTPRequestRangeNotSatisfiable(text=str(error)) from error
        start, stop, _ = wanted.indices(size)
        whole = wanted.start is None and wanted.stop is None
        response = web.StreamResponse(status=200 if whole else 206)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if not whole:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        async with asyncio.timeout(_SEND_LIMIT_S):
            await response.prepare(request)
            await _body(request, response, file, offset + start, stop - start)
            await response.write_eof()
        self._counters.chunks_out += 1
        self._counters.bytes_out += stop - start
        return response


async def _body(request: web.Request, response: web.StreamResponse, file: HeldFile, offset: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.BaseEventLoop) and request.transport is not None:  # uvloop has no sendfile
        with os.fdopen(os.dup(file.descriptor), "rb") as source:
            await loop.sendfile(request.transport, source, offset, count)
        return
    data = file.slice(offset, count)
    for start in range(0, count, _PIECE_BYTES):
        await response.write(data[start : start + _PIECE_BYTES])
