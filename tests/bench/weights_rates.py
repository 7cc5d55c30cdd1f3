"""Rates and rivals of B4, measured in the same run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Final

import numpy as np
import torch

from tests.bench.weights_line import Model

_GIB: Final = 1 << 30


def hash_gib_s(size_bytes: int = 256 << 20) -> float:
    """xxh3-128 over memory that no cache holds, in chunks, the best of some passes."""
    from physarum.weightsync.digest import digest_of

    data = memoryview(np.ones(size_bytes, np.uint8)).cast("B")  # pages that nobody wrote are all the same one
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for start in range(0, size_bytes, 4 << 20):
            digest_of(data[start : start + (4 << 20)])
        best = min(best, time.perf_counter() - began)
    return size_bytes / best / _GIB


async def loopback_gib_s(size_bytes: int = 1 << 30) -> float:
    """One plain TCP connection, received into memory that is there."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        block = memoryview(bytearray(4 << 20))
        for _ in range(size_bytes // len(block)):
            writer.write(block)
            await writer.drain()
        writer.close()

    import socket

    server = await asyncio.start_server(send, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def receive() -> float:
        target, count = memoryview(bytearray(4 << 20)), 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            began = time.perf_counter()
            while (got := connection.recv_into(target)) > 0:
                count += got
        return count / (time.perf_counter() - began) / _GIB

    async with server:
        return await asyncio.to_thread(receive)


def disk_reload_s(size_bytes: int) -> float:
    """The plain way: write a checkpoint with safetensors, load it from disk into an engine's memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = Model(size_bytes)
    memory = {name: torch.ones_like(tensor) for name, tensor in model.export()}
    with tempfile.TemporaryDirectory(prefix="b4-disk-") as place:
        path = f"{place}/model.safetensors"
        began = time.perf_counter()
        save_file({name: tensor.contiguous().clone() for name, tensor in model.export()}, path)
        with safe_open(path, "pt") as file:
            for name, tensor in memory.items():
                tensor.copy_(file.get_tensor(name))
        return round(time.perf_counter() - began, 4)
