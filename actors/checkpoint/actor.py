"""The checkpoint actor: holds weight versions as content-addressed chunks, and a store of blobs; serves both over HTTP.

The trainer finds it by presence, sends what is missing, then the manifest; receivers fetch from it. It keeps what it was
given across its own restarts (folder `weights/` of the run), and refuses versions older than its newest. Actors of other
machines find its blobs the same way; one checkpoint actor sweeps all of them (sweeping.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar, Final

from aiohttp import web

from physarum.actors.address import http_url
from physarum.actors.carrying import carrier_of
from physarum.actors.checkpoint.blob_service import BlobService
from physarum.actors.checkpoint.mirroring import Mirroring
from physarum.actors.checkpoint.model_service import ModelService
from physarum.actors.checkpoint.pins import pinned
from physarum.actors.checkpoint.sweeping import Sweeping
from physarum.actors.errors import UnrecoverableError
from physarum.actors.runtime import Actor
from physarum.actors.weights_area import weights_area
from physarum.bus.blobs import BlobStore
from physarum.configs.secrets import read_secret
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.server import checkpoint_app

_LOOPBACK: Final = "127.0.0.1"
_EVERYWHERE: Final = "0.0.0.0"


class CheckpointActor(Actor):
    """Role checkpoint: one HTTP service. Announces `facts["url"]`, and `facts["store"]`, the id of its blob store."""

    role: ClassVar[str] = "checkpoint"

    async def run(self) -> None:
        token = read_secret(self.config.checkpoint.token_env)
        folder = self.context.folder.weights
        store = await asyncio.to_thread(ChunkStore, folder / "chunks", True)
        area = await asyncio.to_thread(weights_area, self.context.folder, self.config)
        with area.served():
            catalogue = await asyncio.to_thread(Catalogue, folder / "manifests", store, True, area)
            try:
                await self._serve(store, catalogue, token)
            finally:
                catalogue.close()

    async def _serve(self, store: ChunkStore, catalogue: Catalogue, token: str | None) -> None:
        carrier = await carrier_of(self.context)
        data = DataServer(catalogue, token, _EVERYWHERE if token else _LOOPBACK, carrier)
        await data.start()
        try:
            await self._serve_versions(store, catalogue, token, data)
        finally:
            await data.close()
            if carrier is not None:
                await asyncio.to_thread(carrier.close)

    async def _serve_versions(
        self, store: ChunkStore, catalogue: Catalogue, token: str | None, data: DataServer
    ) -> None:
        mirroring = Mirroring(self, catalogue)
        app = checkpoint_app(
            store,
            catalogue,
            token,
            self._on_manifest,
            self.config.checkpoint.keep_last,
            pinned=lambda: self._kept(mirroring),
            data=data,
        )
        blobs = BlobStore(self._blob_folder())
        app.add_routes(BlobService(blobs, self.config.blobs.largest_bytes).routes())
        app.add_routes(ModelService(self.context.folder.start_model).routes())
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, _EVERYWHERE if token else _LOOPBACK, self.config.checkpoint.port)
            await self._start(site)
            port = runner.addresses[0][1]
            identity = await asyncio.to_thread(blobs.identity)
            self.facts = {"url": http_url(self.context.address if token else _LOOPBACK, port), "store": identity}
            self.become("ready")
            async with asyncio.TaskGroup() as group:
                group.create_task(Sweeping(self.context, self._on_swept).run(), name="sweep blobs")
                group.create_task(mirroring.run(), name="mirror versions")
        finally:
            await runner.cleanup()

    async def _kept(self, mirroring: Mirroring) -> frozenset[str] | None:
        """What is pinned, and what is just being copied elsewhere."""
        labels = await pinned(self.context)
        return labels if labels is None or mirroring.under_way is None else labels | {mirroring.under_way}

    def _blob_folder(self) -> Path:
        """The first one serves the run's own `blobs/`; further ones on the same machine must not be the same store."""
        index = self.context.identity.index
        return self.context.folder.path / ("blobs" if index == 0 else f"blobs-{index}")

    async def _start(self, site: web.TCPSite) -> None:
        try:
            await site.start()
        except OSError as error:
            raise UnrecoverableError(
                f"checkpoint.port {self.config.checkpoint.port} cannot be opened ({error.strerror});"
                " free it, or set checkpoint.port to another or to 0 for any"
            ) from error

    async def _on_manifest(self, manifest: Manifest) -> None:
        self.numbers["versions"] = self.numbers.get("versions", 0) + 1
        self.facts["newest"] = manifest.label
        self.progressed()
        self.announce()

    def _on_swept(self, freed_bytes: int) -> None:
        self.numbers["blob_bytes_freed"] = self.numbers.get("blob_bytes_freed", 0) + freed_bytes
        self.progressed()
