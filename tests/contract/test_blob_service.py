"""Blobs over real HTTP: verified and on disk before the answer, refused by name, and nothing left of what was cut."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from actor_fixture import eventually
from aiohttp import web
from blob_fixture import TOKEN, Served, served
from yarl import URL

from physarum.bus.blob_remote import RemoteStore
from physarum.bus.blobs import BlobRef, digest
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobNoRoomError,
    BlobRefusedError,
    BlobUnreachableError,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

DATA = bytes(range(256)) * 4096
"""1 MiB"""
REF = BlobRef.of(DATA)


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, largest_bytes=4 << 20) as running:
        yield running


def client(service: Served, token: str | None = TOKEN) -> RemoteStore:
    return RemoteStore("store", service.url, token, timeout_s=2.0)


async def raw(service: Served, method: str, path: str, **more: Any) -> tuple[int, bytes, dict[str, str]]:
    headers = {"Authorization": f"Bearer {TOKEN}", **more.pop("headers", {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(service.url + path, encoded=True), headers=headers, **more) as response,
    ):
        return response.status, await response.read(), dict(response.headers)


def files(service: Served) -> list[str]:
    return sorted(path.name for path in service.store.folder.rglob("*") if path.is_file())


async def test_what_was_put_is_got_whole_in_part_and_by_its_head(service: Served) -> None:
    await client(service).put(REF, DATA)
    assert await client(service).get(REF) == DATA
    path = f"/v1/blobs/{REF.digest}"
    status, body, headers = await raw(service, "GET", path, headers={"Range": "bytes=1000-1009"})
    assert (status, body, headers["Content-Range"]) == (206, DATA[1000:1010], f"bytes 1000-1009/{len(DATA)}")
    status, body, headers = await raw(service, "HEAD", path)
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(DATA)))
    assert (await raw(service, "PUT", path, data=DATA))[0] == 200, "known"
    assert files(service) == [REF.digest]


async def test_bytes_are_fsynced_before_the_answer(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        synced.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else str(os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    assert (await raw(service, "PUT", f"/v1/blobs/{REF.digest}", data=DATA))[0] == 201
    assert synced[-2:] == [str(len(DATA)), "folder"]


async def test_altered_bytes_are_refused_and_leave_nothing(service: Served) -> None:
    with pytest.raises(BlobAlteredError, match=f"422: the bytes received as blob {REF.digest} have digest"):
        await client(service).put(REF, b"R" + DATA[1:])
    assert files(service) == []


async def test_a_wrong_token_is_refused_everywhere(service: Served) -> None:
    stranger = client(service, "guess")
    for call in (stranger.put(REF, DATA), stranger.get(REF), stranger.listing(), stranger.remove({})):
        with pytest.raises(BlobRefusedError, match="401: the token is absent or wrong"):
            await call
    assert files(service) == []


async def test_an_unknown_digest_is_missing(service: Served) -> None:
    with pytest.raises(BlobMissingError, match="404") as caught:
        await client(service).get(REF)
    assert not isinstance(caught.value, BlobUnreachableError)


@pytest.mark.parametrize("name", ["..%2F..%2Fsecret", "%2Fetc%2Fpasswd", "A" * 32, "a" * 31, ".aside-x", "STORE"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_a_name_that_is_no_digest_never_becomes_a_path(service: Served, name: str, method: str) -> None:
    (service.store.folder.parent / "secret").write_text("secret")
    service.store.identity()
    status, body, _ = await raw(service, method, f"/v1/blobs/{name}", data=None if method != "PUT" else b"x")
    assert status == 400 and b"secret" not in body.replace(b"../../secret", b"")
    assert files(service) == ["STORE"]


async def test_a_body_without_length_or_above_the_limit_is_refused(service: Served) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield DATA

    assert (await raw(service, "PUT", f"/v1/blobs/{REF.digest}", data=endless()))[0] == 411
    with pytest.raises(BlobRefusedError, match=r"413: blob of 5242880 bytes; expected at most 4194304"):
        await client(service).put(BlobRef.of(DATA * 5), DATA * 5)
    assert files(service) == []


async def test_a_sender_that_dies_in_the_middle_leaves_nothing(service: Served) -> None:
    where = urlsplit(service.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"PUT /v1/blobs/{REF.digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(DATA)}"
    writer.write(head.encode() + b"\r\n\r\n" + DATA[: len(DATA) // 2])
    await writer.drain()
    await eventually(lambda: len(files(service)) == 1)
    writer.transport.abort()
    await eventually(lambda: files(service) == [])
    await client(service).put(REF, DATA)
    assert await client(service).get(REF) == DATA


async def test_a_server_that_dies_in_the_middle_is_asked_again(service: Served) -> None:
    service.store.put(DATA)
    deaths = 1

    def cut(request: web.Request) -> web.StreamResponse | None:
        nonlocal deaths
        if deaths == 0:
            return None
        deaths -= 1
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA) + DATA[:1000])
        request.transport.close()
        return None

    service.before = cut
    assert await client(service).get(REF) == DATA
    deaths = 100
    with pytest.raises(BlobUnreachableError, match=f"GET {service.url}/v1/blobs/{REF.digest} failed"):
        await client(service).get(REF)
    assert service.count("GET") == 2 + 3


async def test_an_altered_byte_on_the_servers_disk_is_noticed_on_arrival_and_healed_by_a_put(service: Served) -> None:
    service.store.put(DATA)
    service.store.path(REF.digest).write_bytes(b"R" + DATA[1:])
    with pytest.raises(BlobAlteredError, match=f"blob {REF.digest} from {service.url} has 1048576 bytes with digest"):
        await client(service).get(REF)
    await client(service).put(REF, DATA)
    assert await client(service).get(REF) == DATA


async def test_a_file_that_grew_is_not_read_to_its_end(service: Served) -> None:
    small = service.store.put(b"small")
    service.store.path(small.digest).write_bytes(DATA)
    with pytest.raises(BlobAlteredError, match=f"blob {small.digest}"):
        await client(service).get(small)


@pytest.mark.parametrize("call", ["write", "fsync"])
async def test_a_full_disk_is_507_with_a_remedy_and_leaves_nothing(
    service: Served, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", full)
            (service.store.folder / REF.digest[:2]).mkdir(parents=True)
        else:
            patch.setattr("physarum.bus.blobs.Incoming.write", full)
        with pytest.raises(BlobNoRoomError, match=r"507: no room for a blob of 1048576 bytes.*Free some there"):
            await client(service).put(REF, DATA)
    assert files(service) == []
    await client(service).put(REF, DATA)
    assert await client(service).get(REF) == DATA


async def test_a_server_that_says_nothing_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BlobUnreachableError, match="had no answer within"):
            await RemoteStore("store", f"http://127.0.0.1:{port}", None, timeout_s=0.2).get(REF)


async def test_only_what_was_listed_can_be_removed(service: Served) -> None:
    service.store.put(DATA)
    (service.store.folder.parent / "secret").write_text("secret")
    listed = await client(service).listing()
    assert list(listed) == [REF.digest]
    with pytest.raises(BlobRefusedError, match="400"):
        await client(service).remove({"../secret": 0})
    assert await client(service).remove({digest(b"other"): 0}) == 0
    assert await client(service).remove({REF.digest: listed[REF.digest] - 1}) == 0, "stored again since"
    assert await client(service).remove(listed) == len(DATA)
    assert files(service) == []
