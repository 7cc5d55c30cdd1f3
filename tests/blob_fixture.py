"""Blob stores behind real HTTP for tests: one as the checkpoint actor serves it, announced on the bus as it announces it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.actors.checkpoint.blob_service import BlobService
from physarum.bus.blob_access import Blobs
from physarum.bus.blobs import BlobStore
from physarum.bus.connection import Bus
from physarum.bus.presence import EXPIRY_S, GONE, Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.configs.blobs import BlobsConfig
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.server import checkpoint_app

TOKEN = "s3cret"
TOKEN_ENV = "TEST_CHECKPOINT_TOKEN"

Before = Callable[[web.Request], web.StreamResponse | None]


class Served:
    """`before` may answer instead of the service, `hold` keeps it from answering; `requests` are "METHOD path" in order."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.url = ""
        self.requests: list[str] = []
        self.before: Before = lambda request: None
        self.hold: Callable[[], Awaitable[object]] | None = None

    def count(self, method: str) -> int:
        return sum(line.startswith(method) for line in self.requests)


@contextlib.asynccontextmanager
async def served(folder: Path, port: int | None = None, largest_bytes: int = 1 << 30) -> AsyncIterator[Served]:
    """The store in `folder`/blobs, as the checkpoint actor serves it."""
    chunks = ChunkStore(folder / "chunks")
    one = Served(BlobStore(folder / "blobs"))

    @web.middleware
    async def interfere(request: web.Request, handler: Any) -> web.StreamResponse:
        one.requests.append(f"{request.method} {request.path}")
        if one.hold is not None:
            await one.hold()
        instead = one.before(request)
        return instead if instead is not None else await handler(request)

    app = checkpoint_app(chunks, Catalogue(folder / "manifests", chunks), TOKEN)
    app.middlewares.insert(0, interfere)
    app.add_routes(BlobService(one.store, largest_bytes).routes())
    async with TestServer(app, port=port) as server:
        one.url = str(server.make_url("")).rstrip("/")
        yield one


@contextlib.asynccontextmanager
async def announced_store(
    folder: Path, bus: Bus, publisher: Publisher, instance: str = "checkpoint-0"
) -> AsyncIterator[Served]:
    """A served store that everybody of the run can find; gone at the end of the block."""
    async with served(folder) as one:
        facts = {"url": one.url, "store": one.store.identity()}
        await beat(bus, publisher, instance, "ready", facts)
        beating = asyncio.create_task(_beats(bus, publisher, instance, facts))
        try:
            yield one
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await beat(bus, publisher, instance, GONE, facts)


async def _beats(bus: Bus, publisher: Publisher, instance: str, facts: dict[str, Any]) -> None:
    while True:
        await asyncio.sleep(EXPIRY_S / 4)
        await beat(bus, publisher, instance, "ready", facts)


async def beat(bus: Bus, publisher: Publisher, instance: str, state: str, facts: dict[str, Any]) -> None:
    now = time.time()
    await announce(
        bus,
        publisher,
        Heartbeat(
            role="checkpoint",
            instance=instance,
            state=state,
            pid=1,
            host="elsewhere",
            started_at=now,
            sequence=1,
            facts=facts,
        ),
    )


def access(bus: Bus, folder: Path, **changes: object) -> Blobs:
    """Blobs of an actor whose run folder is `folder`."""
    config = BlobsConfig.model_validate({"timeout_s": 5.0, **changes})
    return Blobs(bus, folder / "blobs", folder / "cache", config, TOKEN_ENV, "here")


def never() -> asyncio.Event:
    return asyncio.Event()
