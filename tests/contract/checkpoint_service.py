"""A checkpoint service on loopback for the tests of this folder, with a place to break what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunk_reader import ChunkReader
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.publisher import upload
from physarum.weightsync.server import Pinned, checkpoint_app
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.snapshot import Snapshot

TOKEN = "s3cret"


@dataclass
class Service:
    """`requests` are "METHOD path" in order; `before` may answer instead of the service."""

    url: str
    store: ChunkStore
    catalogue: Catalogue
    announced: list[Manifest] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    before: Callable[[web.Request], web.StreamResponse | None] = lambda request: None

    def sent(self, prefix: str) -> int:
        return sum(line.startswith(prefix) for line in self.requests)


@asynccontextmanager
async def running_service(
    folder: Path,
    keep_last: int | None = None,
    grace_s: float = 300.0,
    area: SharedArea | None = None,
    pinned: Pinned | None = None,
) -> AsyncIterator[Service]:
    """With `area` it serves that host's memory, too."""
    store = ChunkStore(folder / "chunks")
    service = Service("", store, Catalogue(folder / "manifests", store, area=area))

    async def announce(manifest: Manifest) -> None:
        service.announced.append(manifest)

    @web.middleware
    async def interfere(request: web.Request, handler: Callable[..., object]) -> web.StreamResponse:
        service.requests.append(f"{request.method} {request.path}")
        instead = service.before(request)
        return instead if instead is not None else await handler(request)  # type: ignore[misc, no-any-return]

    app = checkpoint_app(store, service.catalogue, TOKEN, announce, keep_last, grace_s, pinned)
    app.middlewares.insert(0, interfere)
    async with TestServer(app) as server:
        service.url = str(server.make_url("")).rstrip("/")
        with area.served() if area is not None else nullcontext():
            yield service
    service.catalogue.close()


def tensors(seed: int, changed: int = 3) -> dict[str, torch.Tensor]:
    """Four tensors of 64 numbers, of which the first `changed` depend on `seed`."""
    make = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    names = ("a", "b", "c", "d")
    return {name: torch.randn(8, 8, generator=make if k < changed else fixed) for k, name in enumerate(names)}


async def publish(
    service: Service,
    client: CheckpointClient,
    number: int,
    named: dict[str, torch.Tensor],
    epoch: int = 1,
    area: SharedArea | None = None,
    deadline_s: float = 5.0,
    chunk_bytes: int = 128,
) -> Manifest:
    """Uploads `named` as policy@EPOCH.NUMBER through `client`'s session, from `area` if the publisher has one."""
    version = Version("policy", epoch, number)
    snapshot = Snapshot.take(named.items(), chunk_bytes, area, f"trainer-{version}")
    try:
        return await upload(
            snapshot, version, service.url, TOKEN, deadline_s, session=client.session, model_digest="m", step=number
        )
    finally:
        snapshot.close()


async def read_chunk(url: str, digest: str, size: int, timeout_s: float = 30.0) -> bytes:
    """A chunk as receivers read it."""
    reader = ChunkReader(url, TOKEN, timeout_s)
    target = bytearray(size)
    try:
        await asyncio.to_thread(reader.read_into, digest, memoryview(target))
    finally:
        reader.close()
    return bytes(target)
