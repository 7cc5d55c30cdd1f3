"""Chunks from the data server's own thread, and a reader whose holder lies, trickles, or dies in the middle."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from checkpoint_service import TOKEN, Service, publish, read_chunk, running_service, tensors

from physarum.weightsync.area import SharedArea
from physarum.weightsync.chunk_reader import ChunkReader
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.digest import digest_of
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from physarum.weightsync.service_client import CheckpointClient

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DATA = os.urandom(3 << 20)


@pytest.fixture
def area(tmp_path: Path) -> SharedArea:
    return SharedArea(tmp_path / "area")


@pytest_asyncio.fixture
async def service(tmp_path: Path, area: SharedArea) -> AsyncIterator[Service]:
    async with running_service(tmp_path / "service", area=area) as running:
        yield running


@pytest_asyncio.fixture
async def data(service: Service) -> AsyncIterator[DataServer]:
    server = DataServer(service.catalogue, TOKEN, "127.0.0.1")
    await server.start()
    yield server
    await server.close()


def url(server: DataServer) -> str:
    return f"http://127.0.0.1:{server.port}"


async def test_chunks_of_files_and_of_the_store_are_whole(service: Service, data: DataServer, area: SharedArea) -> None:
    async with aiohttp.ClientSession() as session:
        manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, tensors(1), area=area)
    service.store.put(digest_of(DATA), DATA)
    for digest, size in [*manifest.sizes().items(), (digest_of(DATA), len(DATA))]:
        assert digest_of(await read_chunk(url(data), digest, size)) == digest
    count = len(manifest.sizes()) + 1
    assert (data.counters.chunks_out, data.counters.bytes_out) == (count, manifest.total_bytes + len(DATA))


async def test_a_range_is_a_range(service: Service, data: DataServer, area: SharedArea) -> None:
    async with aiohttp.ClientSession() as session:
        manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, tensors(1), area=area)
        digest = next(iter(manifest.sizes()))
        whole = await read_chunk(url(data), digest, 128)
        headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=8-15"}
        async with session.get(f"{url(data)}/v1/chunks/{digest}", headers=headers) as response:
            assert (response.status, await response.read()) == (206, whole[8:16])


async def test_without_the_token_nothing_is_served(data: DataServer) -> None:
    reader = ChunkReader(url(data), "wrong", 5.0)
    with pytest.raises(ServiceRefusedError, match="401"):
        await asyncio.to_thread(reader.read_into, digest_of(b"x"), memoryview(bytearray(1)))
    assert data.counters.unauthorized == 1
    with pytest.raises(ChunkMissingError):
        await read_chunk(url(data), digest_of(b"x"), 1)


async def test_a_receiver_is_sent_to_the_data_server(tmp_path: Path) -> None:
    """Its address comes from the service; one that has none serves chunks itself."""
    async with aiohttp.ClientSession() as session, running_service(tmp_path) as service:
        client = CheckpointClient(service.url, TOKEN, session)
        assert await client.data_url() == service.url


async def answered_by(answer: Answer, size: int, timeout_s: float) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        await read_chunk(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", digest_of(DATA), size, timeout_s)


def answering(head: bytes, body: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        await then(writer)

    return answer


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def trickled(writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        writer.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


async def test_a_holder_that_trickles_is_left_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(ServiceUnreachableError, match=r"not answered whole within 0\.5 s"):
        await answered_by(answering(HEAD % len(DATA), DATA[:100], trickled), len(DATA), 0.5)
    assert time.monotonic() - began < 5


async def test_a_holder_that_dies_in_the_middle_is_named() -> None:
    with pytest.raises(ServiceUnreachableError, match="IncompleteRead"):
        await answered_by(answering(HEAD % len(DATA), DATA[:100], closed), len(DATA), 5.0)


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        (HEAD % len(DATA), DATA[:-1] + bytes([DATA[-1] ^ 1]), "altered or cut"),
        (HEAD % 10, b"0123456789", "is 10 bytes, expected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\n", "is None bytes, expected"),
    ],
    ids=["altered", "another length", "no length"],
)
async def test_a_holder_that_lies_is_named(head: bytes, body: bytes, message: str) -> None:
    with pytest.raises(ChunkAlteredError, match=message):
        await answered_by(answering(head, body, closed), len(DATA), 5.0)


async def test_what_is_no_http_is_named() -> None:
    with pytest.raises(ServiceUnreachableError, match="BadStatusLine"):
        await answered_by(answering(b"hello\r\n\r\n", b"", closed), len(DATA), 5.0)
