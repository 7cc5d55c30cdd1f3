"""Chunks read out of a holder's memory: verified like any other, held while a ticket lasts, and by HTTP where anything fails.

Mooncake and NIXL are extras that no lock has: what needs them skips itself where they do not import.
"""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import aiohttp
import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from checkpoint_service import TOKEN, Service, publish, running_service
from engine_fixture import ROOT
from test_weightsync_receiver import StubEngine, same

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.carriers import issuing, registry
from physarum.weightsync.carriers.carrier import Carrier, Place, address_of
from physarum.weightsync.carriers.registry import carrier_for, lacking
from physarum.weightsync.data_server import DataServer
from physarum.weightsync.errors import CarrierError
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = pytest.mark.timeout(120)

REAL = [name for name in ("mooncake", "nixl") if not lacking(name)]


class MemoryCarrier:
    """Reads within this process, what is registered with any of them; `spoils` alters what it reads, `broken` reads nothing."""

    name = "memory"
    readable: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.reads = 0
        self.spoils = self.broken = False
        self.registered: list[Place] = []

    def register(self, memory: memoryview) -> Place:
        place = Place("here", address_of(memory), memory.nbytes)
        self.readable[place.address] = place.size
        self.registered.append(place)
        return place

    def unregister(self, place: Place) -> None:
        self.registered.remove(place)
        del self.readable[place.address]

    def read(self, place: Place, offset: int, target: memoryview, timeout_s: float) -> None:
        if self.broken or place.address not in self.readable:
            raise CarrierError("no route to that memory")
        self.reads += 1
        ctypes.memmove(address_of(target), place.at(offset, target.nbytes), target.nbytes)
        if self.spoils:
            target[0] ^= 1

    def close(self) -> None:
        """Nothing outlives the test."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(32, 16, generator=generator) for number in range(4)}


class Hosts:
    """A service that issues tickets, and a receiver with an area of its own."""

    def __init__(
        self,
        folder: Path,
        area: SharedArea,
        service: Service,
        session: aiohttp.ClientSession,
        held: Carrier,
        here: Carrier,
    ) -> None:
        self.service = service
        self.area = area
        self.data = DataServer(service.catalogue, TOKEN, "127.0.0.1", held)
        self.client = CheckpointClient(service.url, TOKEN, session)
        self.engine = StubEngine()
        self.receiver = Receiver(
            self.engine,
            Staging(SharedArea(folder / "here"), "engine-0"),
            session,
            live=Version("policy", 1, 0),
            carrier=here,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.data.port}"

    async def publish(self, number: int) -> Manifest:
        return await publish(self.service, self.client, number, weights(number), area=self.area, chunk_bytes=512)

    async def apply(self, manifest: Manifest) -> None:
        await self.receiver.apply(manifest, [self.url], TOKEN)
        assert same(self.engine.weights, weights(manifest.version.number))


@asynccontextmanager
async def running(folder: Path, held: Carrier, here: Carrier) -> AsyncIterator[Hosts]:
    area = SharedArea(folder / "held")
    async with running_service(folder / "service", area=area) as service, aiohttp.ClientSession() as session:
        made = Hosts(folder, area, service, session, held, here)
        await made.data.start()
        yield made
        await made.receiver.close()
        await made.data.close()


@pytest.fixture
def carriers() -> tuple[MemoryCarrier, MemoryCarrier]:
    """The holder's and the reader's."""
    return MemoryCarrier(), MemoryCarrier()


@pytest_asyncio.fixture
async def hosts(tmp_path: Path, carriers: tuple[MemoryCarrier, MemoryCarrier]) -> AsyncIterator[Hosts]:
    async with running(tmp_path, *carriers) as made:
        yield made


async def test_every_chunk_is_read_out_of_the_holders_memory(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier]
) -> None:
    manifest = await hosts.publish(1)
    await hosts.apply(manifest)
    assert carriers[1].reads == len(manifest.sizes()) and hosts.data.counters.chunks_out == 0
    assert carriers[1].registered == [] and len(carriers[0].registered) == 1


async def test_nobody_reads_after_the_holders_end(
    tmp_path: Path, carriers: tuple[MemoryCarrier, MemoryCarrier]
) -> None:
    async with running(tmp_path, *carriers) as hosts:
        await hosts.apply(await hosts.publish(1))
        assert carriers[0].registered
    assert carriers[0].registered == []


@pytest.mark.parametrize("fault", ["spoils", "broken", "other carrier", "no carrier there"])
async def test_whatever_fails_is_fetched_by_http(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier], fault: str
) -> None:
    manifest = await hosts.publish(1)
    here = carriers[1]
    here.spoils, here.broken = fault == "spoils", fault == "broken"
    here.name = "other" if fault == "other carrier" else here.name
    urls = [hosts.service.url] if fault == "no carrier there" else [hosts.url]
    await hosts.receiver.apply(manifest, urls, TOKEN)
    assert same(hosts.engine.weights, weights(1))
    assert hosts.receiver.checksum_failures == (len(manifest.sizes()) if fault == "spoils" else 0)


async def test_a_version_with_a_ticket_is_not_overwritten_when_it_is_given_up(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await hosts.publish(1)
    client = CheckpointClient(hosts.url, TOKEN, hosts.client.session)
    ticket = await client.ticket(manifest.label)
    assert ticket is not None and (ticket.carrier, set(ticket.offsets)) == ("memory", set(weights(1)))
    again = await client.ticket(manifest.label)
    assert again == ticket and len(carriers[0].registered) == 1
    await hosts.publish(2)
    await asyncio.to_thread(hosts.service.catalogue.retain, 1)
    assert list((hosts.area.folder / "spare").iterdir()) == [], "its memory is not used again"
    copy = bytearray(ticket.place.size - ticket.offsets["t0"])
    carriers[1].read(ticket.place, ticket.offsets["t0"], memoryview(copy), 1.0)
    assert copy[: 32 * 16 * 4] == weights(1)["t0"].numpy().tobytes()
    assert await client.ticket(manifest.label) == ticket, "who has begun may ask again"
    monkeypatch.setattr(issuing, "LEASE_S", -issuing._MARGIN_S)  # over at once
    await client.ticket(manifest.label)
    assert await client.ticket("policy@1.2") is not None
    assert await client.ticket(manifest.label) is None, "its lease is over, and it was given up"


async def test_versions_that_follow_each_other_keep_no_memory_once_they_were_read(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "IDLE_S", 60.0)
    for number in range(1, 5):
        await hosts.apply(await hosts.publish(number))
        assert len(carriers[0].registered) == 1, "the newest alone, for whoever comes next"
    assert hosts.data.counters.chunks_out == 0


async def test_readers_that_died_with_their_tickets_hold_two_versions_at_most(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier]
) -> None:
    client = CheckpointClient(hosts.url, TOKEN, hosts.client.session)
    for number in range(1, 4):
        manifest = await hosts.publish(number)
        assert (await client.ticket(manifest.label) is not None) == (number < 3)
    assert len(carriers[0].registered) == issuing.MOST
    await hosts.receiver.apply(manifest, [hosts.url], TOKEN)
    assert same(hosts.engine.weights, weights(3)) and carriers[1].reads == 0


async def test_a_read_that_failed_may_be_under_way_and_keeps_its_ticket(
    hosts: Hosts, carriers: tuple[MemoryCarrier, MemoryCarrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "IDLE_S", 60.0)
    carriers[1].broken = True
    await hosts.apply(await hosts.publish(1))
    carriers[1].broken = False
    for number in (2, 3):
        await hosts.apply(await hosts.publish(number))
    assert len(carriers[0].registered) == 2, "of the first and of the newest"


def test_what_is_not_registered_is_not_read() -> None:
    place = Place("here", 1000, 10)
    assert place.at(2, 8) == 1002
    for offset, count in ((3, 8), (-1, 2), (11, 0)):
        with pytest.raises(CarrierError, match="of memory of 10"):
            place.at(offset, count)


def test_what_is_configured_and_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tuple(replace(kind, modules=(f"no_such_{kind.name}",)) for kind in registry.KINDS)
    monkeypatch.setattr(registry, "KINDS", kinds)
    for name in ("mooncake", "nixl"):
        with pytest.raises(CarrierError, match=rf"No module named 'no_such_{name}'.*pip install 'physarum\[{name}\]'"):
            carrier_for(name, "127.0.0.1")
        assert "checkpoint.carrier: http" in lacking(name)
    monkeypatch.setattr(registry, "rdma_devices", lambda: ["mlx5_0"])
    assert carrier_for("auto", "127.0.0.1") is None and carrier_for("http", "127.0.0.1") is None


@contextmanager
def holder(name: str, path: Path) -> Iterator[tuple[Place, subprocess.Popen[bytes]]]:
    """A process of its own, whose memory is read."""
    command = [sys.executable, str(ROOT / "tests" / "carrier_holder.py"), name, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith(b"{"))
        yield msgspec.json.decode(line, type=Place), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_memory_of_another_process_is_read_by_the_real_library(tmp_path: Path, name: str) -> None:
    if name not in REAL:
        pytest.skip(lacking(name))
    data = np.arange(8 << 20, dtype=np.uint32).astype(np.uint8)
    (tmp_path / "data").write_bytes(data.tobytes())
    carrier = carrier_for(name, "127.0.0.1")
    assert carrier is not None
    target = np.zeros(1 << 20, np.uint8)
    mine = carrier.register(memoryview(target))
    with holder(name, tmp_path / "data") as (place, process):
        for offset in (0, 4096, (8 << 20) - (1 << 20)):
            carrier.read(place, offset, memoryview(target), 20.0)
            assert np.array_equal(target, data[offset : offset + (1 << 20)])
        carrier.read(place, 3, memoryview(target)[5:9], 20.0)
        assert target[5:9].tolist() == [3, 4, 5, 6]
        with pytest.raises(CarrierError, match="asked for"):
            carrier.read(place, 8 << 20, memoryview(target), 20.0)
        process.kill()
        process.wait()
        with pytest.raises(CarrierError, match="could not read|did not read"):
            carrier.read(place, 0, memoryview(target), 20.0)
    carrier.unregister(mine)
    carrier.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake", "nixl"])
async def test_versions_travel_by_the_real_library(tmp_path: Path, name: str) -> None:
    if name not in REAL:
        pytest.skip(lacking(name))
    held, here = (carrier_for(name, "127.0.0.1") for _ in range(2))
    assert held is not None and here is not None
    async with running(tmp_path, held, here) as hosts:
        for number in range(1, 4):
            await hosts.apply(await hosts.publish(number))
        assert hosts.data.counters.chunks_out == 0 and hosts.receiver.checksum_failures == 0
    held.close()
    here.close()
