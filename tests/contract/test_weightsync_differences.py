"""A version to another host as what differs from the one before: little is sent, and what goes wrong costs a whole chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from checkpoint_service import TOKEN, Service, publish, running_service
from test_weightsync_receiver import StubEngine, same

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.difference import HEADER
from physarum.weightsync.holdings import Holdings
from physarum.weightsync.pace import Differences
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = pytest.mark.timeout(30)

CHUNK_BYTES = 1 << 16


@pytest.fixture
def area(tmp_path: Path) -> SharedArea:
    return SharedArea(tmp_path / "area")


@pytest_asyncio.fixture
async def service(tmp_path: Path, area: SharedArea) -> AsyncIterator[Service]:
    async with running_service(tmp_path / "service", keep_last=2, grace_s=-1.0, area=area) as running:
        yield running


@pytest_asyncio.fixture
async def client(service: Service) -> AsyncIterator[CheckpointClient]:
    async with aiohttp.ClientSession() as session:
        yield CheckpointClient(service.url, TOKEN, session, timeout_s=5.0)


class Host:
    """Another host's receiver, its engine, and what it serves to others."""

    def __init__(self, folder: Path, client: CheckpointClient, differences: Differences = "always") -> None:
        self.engine, self.holdings, self.area = StubEngine(), Holdings(), SharedArea(folder)
        self.receiver = Receiver(
            self.engine,
            Staging(self.area, "engine-0"),
            client.session,
            live=Version("policy", 1, 0),
            holdings=self.holdings,
            differences=differences,
        )


def weights(step: int) -> dict[str, torch.Tensor]:
    """Two tensors in bfloat16; each step moves every hundredth number to the next one there is."""
    make = torch.Generator().manual_seed(7)
    made = {name: torch.randn(256, 512, generator=make).bfloat16() for name in ("a", "b")}
    for number in range(step):
        for tensor in made.values():
            tensor.view(torch.int16).flatten()[number::100] += 1
    return made


async def test_little_is_sent_where_little_changed(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", client)
    for number in range(4):
        manifest = await publish(service, client, number + 1, weights(number), area=area, chunk_bytes=CHUNK_BYTES)
        record = await host.receiver.apply(manifest, [service.url], TOKEN)
        assert same(host.engine.weights, weights(number))
        if number:
            assert record.bytes_fetched < manifest.total_bytes / 50
        else:
            assert record.bytes_fetched == manifest.total_bytes


@pytest.mark.parametrize("answer", [b"", b"X", b"S\0\0", b"?", b"X" * 2 * CHUNK_BYTES])
async def test_a_difference_that_is_none_costs_a_whole_chunk_and_is_counted(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path, answer: bytes
) -> None:
    host = Host(tmp_path / "host", client)
    first = await publish(service, client, 1, weights(0), area=area, chunk_bytes=CHUNK_BYTES)
    await host.receiver.apply(first, [service.url], TOKEN)
    service.before = lambda request: (
        web.Response(body=answer, headers={HEADER: request.query["base"]}) if "base" in request.query else None
    )
    second = await publish(service, client, 2, weights(1), area=area, chunk_bytes=CHUNK_BYTES)
    record = await host.receiver.apply(second, [service.url], TOKEN)
    assert record.bytes_fetched == second.total_bytes and same(host.engine.weights, weights(1))
    assert host.receiver.checksum_failures == len(second.sizes())


@pytest.mark.parametrize("policy", ["always", "auto"])
@pytest.mark.parametrize("how", ["refuses", "hangs up"])
async def test_a_service_that_fails_at_differences_costs_whole_chunks(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path, how: str, policy: Differences
) -> None:
    """The failure of one difference was that of the version, at each attempt."""

    def fail(request: web.Request) -> web.Response | None:
        if "base" not in request.query:
            return None
        if how == "hangs up":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=500)

    host = Host(tmp_path / "host", client, policy)
    first = await publish(service, client, 1, weights(0), area=area, chunk_bytes=CHUNK_BYTES)
    await host.receiver.apply(first, [service.url], TOKEN)
    service.before = fail
    second = await publish(service, client, 2, weights(1), area=area, chunk_bytes=CHUNK_BYTES)
    record = await host.receiver.apply(second, [service.url], TOKEN)
    assert record.bytes_fetched == second.total_bytes and same(host.engine.weights, weights(1))


async def test_a_difference_to_another_base_is_verified_like_all_else(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    """A service that is wrong about the base: what it sends applies, and is not the chunk."""
    host = Host(tmp_path / "host", client)
    first = await publish(service, client, 1, weights(0), area=area, chunk_bytes=CHUNK_BYTES)
    await host.receiver.apply(first, [service.url], TOKEN)
    await publish(service, client, 2, weights(1), area=area, chunk_bytes=CHUNK_BYTES)
    third = await publish(service, client, 3, weights(2), area=area, chunk_bytes=CHUNK_BYTES)
    right, wrong = service.catalogue.difference, third.tensors[1].chunks[0].digest
    service.catalogue.difference = lambda digest, base, width: right(digest, wrong, width)  # type: ignore[method-assign]
    record = await host.receiver.apply(third, [service.url], TOKEN)
    assert same(host.engine.weights, weights(2))
    assert host.receiver.checksum_failures == len(third.sizes()) and record.bytes_fetched == third.total_bytes


async def test_a_base_that_was_altered_here_or_is_gone_there_costs_whole_chunks(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", client)
    first = await publish(service, client, 1, weights(0), area=area, chunk_bytes=CHUNK_BYTES)
    await host.receiver.apply(first, [service.url], TOKEN)
    path = host.area.path(first.label)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last chunk
    path.write_bytes(content)
    second = await publish(service, client, 2, weights(1), area=area, chunk_bytes=CHUNK_BYTES)
    record = await host.receiver.apply(second, [service.url], TOKEN)
    assert CHUNK_BYTES < record.bytes_fetched < 2 * CHUNK_BYTES and same(host.engine.weights, weights(1))
    for number in (3, 4, 5):  # two are kept
        newest = await publish(service, client, number, weights(number), area=area, chunk_bytes=CHUNK_BYTES)
    record = await host.receiver.apply(newest, [service.url], TOKEN)
    assert record.bytes_fetched == newest.total_bytes and same(host.engine.weights, weights(5))


async def test_hosts_pass_differences_on_as_they_came(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    hosts = [Host(tmp_path / f"host-{number}", client) for number in range(2)]
    server = DataServer(hosts[0].holdings, TOKEN, "127.0.0.1")
    await server.start()
    try:
        for number in range(2):
            manifest = await publish(service, client, number + 1, weights(number), area=area, chunk_bytes=CHUNK_BYTES)
            await hosts[0].receiver.apply(manifest, [service.url], TOKEN)
            asked = service.sent("GET /v1/chunks/")
            record = await hosts[1].receiver.apply(manifest, [service.url], TOKEN, [f"http://127.0.0.1:{server.port}"])
        assert service.sent("GET /v1/chunks/") == asked and record.bytes_fetched < manifest.total_bytes / 50
        assert server.counters.differences_out == len(manifest.sizes())
        assert same(hosts[1].engine.weights, weights(1))
    finally:
        await server.close()
