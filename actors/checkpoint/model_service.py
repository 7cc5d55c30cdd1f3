"""The start model over HTTP, behind the token of the same service: for machines of the run that do not have it.

    GET  /v1/start_model             -> JSON list of its files (name, size_bytes, digest); 404 where there is none
    GET  /v1/start_model/{name}      (Range allowed) -> the bytes, by sendfile; 404 no such file

Invariant: what is sent is a file of the list. Who receives it verifies it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from aiohttp import web

from physarum.actors.model_files import ModelFile, files_of
from physarum.weightsync.answers import json_answer, refusal


class ModelService:
    """The handlers for one folder, which does not change while a run lasts; it is read when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, ModelFile] | None = None
        self._reading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/start_model", self.listing),
            web.get("/v1/start_model/{name:.+}", self.get),
        ]

    async def listing(self, request: web.Request) -> web.Response:
        files = await self._known()
        if not files:
            return refusal(404, f"no start model in {self._folder}")
        return json_answer(msgspec.to_builtins(list(files.values())))

    async def get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in await self._known():
            return refusal(404, f"{name[:80]!r} is no file of the start model")
        return web.FileResponse((self._folder / name).resolve(), headers={"Content-Type": "application/octet-stream"})

    async def _known(self) -> dict[str, ModelFile]:
        async with self._reading:
            if self._files is None:
                found = await asyncio.to_thread(files_of, self._folder.resolve())
                self._files = {file.name: file for file in found}
            return self._files
