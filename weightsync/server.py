"""The checkpoint service over HTTP: chunks in and out, manifests once their chunks are all here.

    POST /v1/missing              JSON list of digests       -> JSON list of those that are absent
    PUT  /v1/chunks/{digest}      bytes                      -> 201 stored, 200 known, 422 digest does not match, 507 disk full
    GET  /v1/chunks/{digest}      (Range allowed)            -> the bytes, by sendfile
    PUT  /v1/manifests/{label}    MessagePack                -> 201 new, 200 known, 409 older, other content, absent
    PUT  /v1/held/{label}?name=N  MessagePack                -> the same; 404: no file N was filled on this host
    GET  /v1/manifests/{label}                               -> MessagePack
    GET  /v1/manifests                                       -> JSON list
    GET  /metrics                                            -> Prometheus text

Invariant: whatever can be fetched was verified when it came in. With a token every request must carry it
(`Authorization: Bearer`), compared in constant time. Disk and hashing happen in threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from physarum.bus.errors import CodecError
from physarum.weightsync.answers import json_answer, no_room, refusal
from physarum.weightsync.catalogue import DEFAULT_GRACE_S, Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.digest import is_digest
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ChunksAbsentError,
    ManifestError,
    StaleVersionError,
)
from physarum.weightsync.manifest import Manifest, decode_manifest, encode_manifest, manifest_digest
from physarum.weightsync.metrics import Counters

_log = logging.getLogger(__name__)

OnManifest = Callable[[Manifest], Awaitable[None]]

Pinned = Callable[[], Awaitable[Collection[str] | None]]
"""Labels that stay; None: not known now, so none is let go."""

LARGEST_BODY_BYTES: Final = 64 * 1024 * 1024
_PIECE_BYTES: Final = 1 << 20
_CHUNKS: Final = "/v1/chunks/"


class CheckpointService:
    """The handlers of one service. `keep_last`: after each new version older ones are given up (None: all are kept)."""

    def __init__(
        self,
        catalogue: Catalogue,
        on_manifest: OnManifest | None,
        keep_last: int | None,
        grace_s: float,
        pinned: Pinned,
    ) -> None:
        self.counters = Counters()
        self._catalogue = catalogue
        self._store = catalogue.store
        self._on_manifest = on_manifest
        self._keep_last = keep_last
        self._pinned = pinned
        self._grace_s = grace_s
        self._accepting = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/missing", self.missing),
            web.put("/v1/chunks/{digest}", self.put_chunk),
            web.get("/v1/chunks/{digest}", self.get_chunk),
            web.put("/v1/manifests/{label}", self.put_manifest),
            web.put("/v1/held/{label}", self.put_manifest),
            web.get("/v1/manifests/{label}", self.get_manifest),
            web.get("/v1/manifests", self.list_manifests),
            web.get("/metrics", self.metrics),
        ]

    async def missing(self, request: web.Request) -> web.Response:
        try:
            digests = msgspec.json.decode(await request.read(), type=list[str])
        except msgspec.DecodeError as error:
            return refusal(400, f"expected a JSON list of digests: {error}")
        strange = next((digest for digest in digests if not is_digest(digest)), None)
        if strange is not None:
            return refusal(400, f"{strange[:80]!r} is no digest")
        return json_answer(await asyncio.to_thread(self._store.missing, digests))

    async def put_chunk(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        if not is_digest(digest):
            return refusal(400, f"{digest[:80]!r} is no digest")
        data = await request.read()
        self.counters.bytes_in += len(data)
        try:
            new = await asyncio.to_thread(self._store.put, digest, data)
        except ChunkAlteredError as error:
            self.counters.checksum_failures += 1
            return refusal(422, str(error))
        except OSError as error:
            return no_room(error, f"a chunk of {len(data)} bytes", self._store.folder)
        self.counters.chunks_in += new
        self.counters.chunks_known += not new
        return web.Response(status=201 if new else 200)

    async def get_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        held = self._catalogue.chunk(digest)
        if held is not None:
            with held[0].using() as is_here:
                if is_here:
                    return await self._send(request, held[1])
        size = await asyncio.to_thread(self._store.size, digest) if is_digest(digest) else None
        if size is None:
            return refusal(404, f"chunk {digest[:80]} is not here; it was given up with its version, or never came")
        return web.FileResponse(self._store.path(digest))

    async def _send(self, request: web.Request, data: memoryview) -> web.StreamResponse:
        """A part of a file in memory, or a range of it. Raises HTTPRequestRangeNotSatisfiable."""
        try:
            wanted = request.http_range
        except ValueError as error:
            raise web.HTTPRequestRangeNotSatisfiable(text=str(error)) from error
        part = data[wanted]
        whole = wanted.start is None and wanted.stop is None
        response = web.StreamResponse(status=200 if whole else 206)
        response.content_type = "application/octet-stream"
        response.content_length = part.nbytes
        if not whole:
            start, stop, _ = wanted.indices(data.nbytes)
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{data.nbytes}"
        await response.prepare(request)
        for start in range(0, part.nbytes, _PIECE_BYTES):
            await response.write(part[start : start + _PIECE_BYTES])
        await response.write_eof()
        self.counters.chunks_out += 1
        self.counters.bytes_out += part.nbytes
        return response

    async def put_manifest(self, request: web.Request) -> web.Response:
        label = request.match_info["label"]
        try:
            manifest = decode_manifest(await request.read())
        except CodecError as error:
            return refusal(400, str(error))
        if manifest.label != label:
            return refusal(400, f"the body is {manifest.label}, the address says {label}")
        async with self._accepting:  # one at a time: the newest version is compared and replaced in one step
            try:
                new = await asyncio.to_thread(self._catalogue.put, manifest, request.query.get("name"))
            except ChunkMissingError as error:
                return refusal(404, str(error))
            except (StaleVersionError, ManifestError, ChunkAlteredError) as error:
                self.counters.manifests_refused += 1
                return refusal(409, str(error))
            except ChunksAbsentError as error:
                self.counters.manifests_refused += 1
                return refusal(409, str(error), missing=error.digests)
            except OSError as error:
                return no_room(error, manifest.label, self._store.folder)
            await self._accepted(manifest, new)
        return web.Response(status=201 if new else 200)

    async def get_manifest(self, request: web.Request) -> web.Response:
        manifest = self._catalogue.get(request.match_info["label"])
        if manifest is None:
            return refusal(404, f"{request.match_info['label']} is not here; GET /v1/manifests lists what is")
        return web.Response(body=encode_manifest(manifest), content_type="application/x-msgpack")

    async def list_manifests(self, request: web.Request) -> web.Response:
        return json_answer(
            [
                {
                    "label": manifest.label,
                    "digest": manifest_digest(manifest),
                    "total_bytes": manifest.total_bytes,
                    "step": manifest.step,
                    "created": manifest.created,
                }
                for manifest in self._catalogue.all()
            ]
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.counters.prometheus(), content_type="text/plain")

    async def count_sent(self, request: web.Request, response: web.StreamResponse) -> None:
        """A signal handler: by now the length is known, of a part as of the whole."""
        chunk = request.path.startswith(_CHUNKS)
        if chunk and isinstance(response, web.FileResponse) and response.status < 300:
            self.counters.chunks_out += 1
            self.counters.bytes_out += response.content_length or 0

    async def _accepted(self, manifest: Manifest, new: bool) -> None:
        """A known manifest is announced again: the publisher repeats itself when the first announcement failed."""
        self.counters.manifests += new
        _log.info("%s is %s: %d bytes", manifest.label, "accepted" if new else "known", manifest.total_bytes)
        if self._on_manifest is not None:
            await self._on_manifest(manifest)
        if new and self._keep_last is not None:
            pinned = await self._pinned()
            if pinned is not None:
                freed = await asyncio.to_thread(self._catalogue.retain, self._keep_last, pinned, self._grace_s)
                self.counters.bytes_freed += freed


def checkpoint_app(
    store: ChunkStore,
    manifests: Catalogue,
    token: str | None,
    on_manifest: OnManifest | None = None,
    keep_last: int | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    pinned: Pinned | None = None,
) -> web.Application:
    """The service as an application to be run by its owner. `on_manifest` is awaited before the publisher is answered,
    and again for each repetition of the same manifest; `pinned` says which versions stay whatever becomes old.

    Raises ValueError when `manifests` keeps its chunks in another store.
    """
    if manifests.store is not store:
        raise ValueError(f"the catalogue's chunks are in {manifests.store.folder}, expected {store.folder}")
    service = CheckpointService(manifests, on_manifest, keep_last, grace_s, pinned or _nothing)
    app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[_authentication(token, service.counters)])
    app.add_routes(service.routes())
    app.on_response_prepare.append(service.count_sent)
    return app


async def _nothing() -> Collection[str]:
    return ()


def _authentication(token: str | None, counters: Counters) -> Middleware:
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if expected is not None and not hmac.compare_digest(given, expected):
            counters.unauthorized += 1
            return refusal(401, "the token is absent or wrong; send Authorization: Bearer TOKEN")
        return await handler(request)

    return authenticate
