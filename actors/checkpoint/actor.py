"""The checkpoint actor: holds weight versions as content-addressed chunks and serves them over HTTP.

The trainer finds it by presence, sends what is missing, then the manifest; receivers fetch from it. It keeps what it was
given across its own restarts (folder `weights/` of the run), and refuses versions older than its newest.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

from aiohttp import web

from physarum.actors.errors import UnrecoverableError
from physarum.actors.runtime import Actor
from physarum.configs.secrets import read_secret
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.server import checkpoint_app

_LOOPBACK: Final = "127.0.0.1"
_EVERYWHERE: Final = "0.0.0.0"


class CheckpointActor(Actor):
    """Role checkpoint: one HTTP service. Announces `facts["url"]`."""

    role: ClassVar[str] = "checkpoint"

    async def run(self) -> None:
        token = read_secret(self.config.checkpoint.token_env)
        folder = self.context.folder.weights
        store = await asyncio.to_thread(ChunkStore, folder / "chunks", True)
        catalogue = await asyncio.to_thread(Catalogue, folder / "manifests", store)
        app = checkpoint_app(store, catalogue, token, self._on_manifest, self.config.checkpoint.keep_last)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, _EVERYWHERE if token else _LOOPBACK, self.config.checkpoint.port)
            await self._start(site)
            port = runner.addresses[0][1]
            self.facts = {"url": f"http://{self.context.host if token else _LOOPBACK}:{port}"}
            self.become("ready")
            await self.context.draining.wait()
        finally:
            await runner.cleanup()

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
