"""Receivers of different hosts serve each other: what one has brought the next takes there, and a liar is passed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from checkpoint_service import TOKEN, Service, publish, read_chunk, running_service, tensors
from test_weightsync_receiver import StubEngine

from physarum.actors.engine.relaying import nearest
from physarum.bus.presence import Heartbeat
from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.errors import ChunkMissingError
from physarum.weightsync.holdings import Holdings
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = pytest.mark.timeout(60)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running_service(tmp_path / "service") as running:
        yield running


class Host:
    """A receiver with an area of its own, and what it serves."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.holdings = Holdings()
        self.server = DataServer(self.holdings, TOKEN, "127.0.0.1")
        self.area = SharedArea(folder)
        self.receiver = Receiver(
            StubEngine(), Staging(self.area, "engine-0"), session, live=Version("policy", 1, 0), holdings=self.holdings
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def close(self) -> None:
        await self.receiver.close()
        await self.server.close()


@pytest_asyncio.fixture
async def hosts(tmp_path: Path, session: aiohttp.ClientSession) -> AsyncIterator[list[Host]]:
    made = [Host(tmp_path / f"host-{number}", session) for number in range(3)]
    for host in made:
        await host.server.start()
    yield made
    for host in made:
        await host.close()


def big(seed: int) -> dict[str, torch.Tensor]:
    return {
        f"t{number}": torch.randn(64, 8, generator=torch.Generator().manual_seed(seed + number)) for number in range(8)
    }


async def test_the_next_host_takes_all_from_the_one_before(
    service: Service, session: aiohttp.ClientSession, hosts: list[Host]
) -> None:
    manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, big(0))
    await hosts[0].receiver.apply(manifest, [service.url], TOKEN)
    asked = service.sent("GET /v1/chunks/")
    record = await hosts[1].receiver.apply(manifest, [service.url], TOKEN, [hosts[0].url])
    assert record.bytes_fetched == manifest.total_bytes and service.sent("GET /v1/chunks/") == asked
    assert hosts[0].server.counters.bytes_out == manifest.total_bytes
    await hosts[0].receiver.apply(
        await publish(service, CheckpointClient(service.url, TOKEN, session), 2, big(9)), [service.url], TOKEN
    )
    with pytest.raises(ChunkMissingError):  # the version before is offered no more
        await read_chunk(hosts[0].url, next(iter(manifest.sizes())), 128)


async def test_hosts_that_fetch_at_the_same_time_give_to_each_other(
    service: Service, session: aiohttp.ClientSession, hosts: list[Host]
) -> None:
    manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, big(0))
    urls = [host.url for host in hosts]
    await asyncio.gather(
        *(
            host.receiver.apply(manifest, [service.url], TOKEN, [url for url in urls if url != host.url])
            for host in hosts
        )
    )
    by_hosts = sum(host.server.counters.chunks_out for host in hosts)
    assert by_hosts + service.sent("GET /v1/chunks/") == 3 * len(manifest.sizes())
    assert all(host.receiver.live == manifest.version for host in hosts)


async def test_a_host_that_lies_or_is_gone_is_passed_over(
    service: Service, session: aiohttp.ClientSession, hosts: list[Host], tmp_path: Path
) -> None:
    manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, tensors(1))
    async with running_service(tmp_path / "liar") as liar:
        liar.before = lambda request: web.Response(body=b"\1" * 128)
        await hosts[0].receiver.apply(manifest, [service.url], TOKEN, ["http://127.0.0.1:9", liar.url])
    assert hosts[0].receiver.checksum_failures == len(manifest.sizes())
    assert hosts[0].receiver.live == manifest.version


def test_the_nearest_come_first() -> None:
    def beat(instance: str, host: str, rack: str = "", url: bool = True) -> Heartbeat:
        facts = {"rack": rack} | ({"chunks": f"http://{host}"} if url else {})
        return Heartbeat(
            role="engine", instance=instance, state="ready", facts=facts, host=host, pid=1, started_at=0.0, sequence=1
        )

    members = [
        beat("a", "far", "r2"),
        beat("b", "mine", "r1"),
        beat("c", "near", "r1"),
        beat("d", "silent", "r1", url=False),
    ]
    assert nearest(members, "mine", "r1") == ["http://near", "http://far"]
    assert sorted(nearest(members, "mine", "")) == ["http://far", "http://near"]
