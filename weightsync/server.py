"""The checkpoint service over HTTP: chunks in and out, manifests once their chunks are all here.

    POST /v1/missing              JSON list of digests       -> JSON list of those that are absent
    PUT  /v1/chunks/{digest}      bytes                      -> 201 stored, 200 known, 422 digest does not match, 507 disk full
    GET  /v1/chunks/{digest}      (Range allowed)            -> the bytes (chunk_route.py)
    GET  /v1/data                                            -> JSON port where chunks are served faster, or 404
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
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
from aiohttp import web

from physarum.bus.errors import CodecError
from physarum.weightsync.answers import json_answer, no_room, refusal
from physarum.weightsync.authentication import authentication
from physarum.weightsync.catalogue import DEFAULT_GRACE_S, Catalogue
from physarum.weightsync.chunk_route import ChunkRoute
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.data_server import DataServer
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


class CheckpointService:
    """The handlers of one service. `keep_last`: after each new version older ones are given up (None: all are kept)."""

    def __init__(
        self,
        catalogue: Catalogue,
        on_manifest: OnManifest | None,
        keep_last: int | None,
        grace_s: float,
        pinned: Pinned,
        data: DataServer | None,
    ) -> None:
        self.counters = Counters()
        self.chunks = ChunkRoute(catalogue, self.counters)
        self._data = data
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
            web.get("/v1/chunks/{digest}", self.chunks.get),
            web.get("/v1/data", self.data),
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

    async def data(self, request: web.Request) -> web.Response:
        if self._data is None:
            return refusal(404, "chunks are served here")
        return json_answer({"port": self._data.port})

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
        counters = self.counters if self._data is None else self.counters + self._data.counters
        return web.Response(text=counters.prometheus(), content_type="text/plain")

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
    data: DataServer | None = None,
) -> web.Application:
    """The service as an application to be run by its owner. `on_manifest` is awaited before the publisher is answered,
    and again for each repetition of the same manifest; `pinned` says which versions stay whatever becomes old; `data`
    serves chunks faster, at a port of its own.

    Raises ValueError when `manifests` keeps its chunks in another store.
    """
    if manifests.store is not store:
        raise ValueError(f"the catalogue's chunks are in {manifests.store.folder}, expected {store.folder}")
    service = CheckpointService(manifests, on_manifest, keep_last, grace_s, pinned or _nothing, data)
    app = web.Application(client_max_size=LARGEST_BODY_BYTES, middlewares=[authentication(token, service.counters)])
    app.add_routes(service.routes())
    app.on_response_prepare.append(service.chunks.count_sent)
    return app


async def _nothing() -> Collection[str]:
    return ()
