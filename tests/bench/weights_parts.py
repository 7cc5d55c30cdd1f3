"""The processes of B4 beside the trainer: `python -m tests.bench.weights_parts service|engine SPEC.json`.

The service is the product's over HTTP; an engine is the product's receiver with a target that copies what it is given into
memory of its own, as an engine does, and generates nothing. Both speak one JSON line at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop
from aiohttp import web

from physarum.weightsync.area import SharedArea
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import FILE_NAME
from physarum.weightsync.receiver import Receiver, SwapRecord
from physarum.weightsync.server import checkpoint_app
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging
from physarum.weightsync.target import PauseMode


class PartSpec(msgspec.Struct, frozen=True):
    """`area`: the memory of the host on which the part runs; `url`: of the service; `tensors` of `tensor_bytes` each have
    their place in an engine's memory before it is ready, as in a real one. `keep_last`: versions that the service keeps."""

    name: str
    folder: str
    area: str
    url: str = ""
    tensors: int = 0
    tensor_bytes: int = 0
    keep_last: int = 1


class Applied(msgspec.Struct, frozen=True):
    """An update, in seconds; `serving_at` in Unix seconds."""

    serving_at: float
    fetch_s: float
    pause_s: float
    bytes_fetched: int
    bytes_applied: int
    checksum_failures: int

    @classmethod
    def by(cls, receiver: Receiver, swap: SwapRecord) -> Applied:
        return cls(
            serving_at=swap.swapped_at,
            fetch_s=swap.fetch_s,
            pause_s=swap.pause_s,
            bytes_fetched=swap.bytes_fetched,
            bytes_applied=swap.bytes_applied,
            checksum_failures=receiver.checksum_failures,
        )


class MemoryTarget:
    """Holds a model; an update copies tensors into it."""

    def __init__(self, tensors: int, tensor_bytes: int) -> None:
        self.memory: dict[str, np.ndarray[Any, Any]] = {
            f"layers.{index}.weight": np.ones(tensor_bytes, np.uint8) for index in range(tensors)
        }
        self.label = ""

    async def check_pause_mode(self, mode: PauseMode) -> None:
        pass

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def update_from_disk(self, folder: Path, label: str, mode: PauseMode) -> None:
        await asyncio.to_thread(self._load, folder / FILE_NAME)
        self.label = label

    async def live_label(self) -> str:
        return self.label

    async def continue_generation(self) -> None:
        pass

    def _load(self, path: Path) -> None:
        with path.open("rb") as source:
            descriptor = source.fileno()
            with HeldFile(os.dup(descriptor)) as file:
                for name in file.forms:
                    np.copyto(self.memory[name], np.frombuffer(file.tensor(name), np.uint8))


async def serve(spec: PartSpec) -> None:
    """Until its input ends."""
    area, folder = SharedArea(Path(spec.area)), Path(spec.folder)
    store = ChunkStore(folder / "chunks", False)
    with area.served():
        catalogue = Catalogue(folder / "manifests", store, False, area)
        data = DataServer(catalogue, None, "127.0.0.1")
        await data.start()
        runner = web.AppRunner(
            checkpoint_app(store, catalogue, None, None, spec.keep_last, -1.0, data=data), access_log=None
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        _say({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()
        await data.close()
        catalogue.close()


async def follow(spec: PartSpec) -> None:
    """Applies the version whose label each line of input names."""
    async with aiohttp.ClientSession() as session:
        staging = Staging(SharedArea(Path(spec.area)), spec.name)
        receiver = Receiver(
            MemoryTarget(spec.tensors, spec.tensor_bytes), staging, session, chunk_timeout_s=120.0, keep_last=1
        )
        client = CheckpointClient(spec.url, None, session, 120.0)
        _say({"ready": spec.name})
        while line := await asyncio.to_thread(sys.stdin.readline):
            manifest = await client.get_manifest(line.strip())
            swap = await receiver.apply(manifest, [spec.url], None)
            _say(Applied.by(receiver, swap))


def _say(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    part, path = sys.argv[1:]
    uvloop.run((serve if part == "service" else follow)(msgspec.json.decode(Path(path).read_bytes(), type=PartSpec)))
