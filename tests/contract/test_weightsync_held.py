"""Publisher, service and engine on one host: a version changes hands by name, its bytes are copied once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from checkpoint_service import TOKEN, Service, publish, read_chunk, running_service, tensors
from test_weightsync_receiver import StubEngine, same

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import ServiceRefusedError, ServiceUnreachableError
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


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


def receiver(engine: StubEngine, area: SharedArea, client: CheckpointClient) -> Receiver:
    return Receiver(engine, Staging(area, "engine-0"), client.session, live=Version("policy", 1, 0))


async def test_nothing_is_sent_and_nothing_is_fetched(
    service: Service, client: CheckpointClient, area: SharedArea
) -> None:
    engine = StubEngine()
    here = receiver(engine, area, client)
    for number in (1, 2, 3):
        manifest = await publish(service, client, number, tensors(number), area=area)
        record = await here.apply(manifest, [service.url], TOKEN)
        assert (record.bytes_fetched, record.bytes_applied) == (0, 3 * 256 if number > 1 else 4 * 256)
        assert same(engine.weights, tensors(number))
    assert {line.split("/")[2] for line in service.requests} == {"held"}
    assert sorted(area.labels()) == ["policy@1.2", "policy@1.3"]
    assert len(list((area.folder / "spare").iterdir())) == 1, "the next version is written over the first one"


async def test_another_host_fetches_from_the_file(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    elsewhere, engine = SharedArea(tmp_path / "elsewhere"), StubEngine()
    there = receiver(engine, elsewhere, client)
    first = await publish(service, client, 1, tensors(1, changed=1), area=area)
    assert (await there.apply(first, [service.url], TOKEN)).bytes_fetched == first.total_bytes
    second = await publish(service, client, 2, tensors(2, changed=1), area=area)
    assert (await there.apply(second, [service.url], TOKEN)).bytes_fetched == 256
    assert same(engine.weights, tensors(2, changed=1))


async def test_a_publisher_of_another_host_sends_its_chunks(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    engine = StubEngine()
    manifest = await publish(service, client, 1, tensors(1), area=SharedArea(tmp_path / "trainer"))
    assert service.sent("PUT /v1/held") == 1 and service.sent("PUT /v1/chunks") == 8
    await receiver(engine, area, client).apply(manifest, [service.url], TOKEN)
    assert same(engine.weights, tensors(1))
    assert list((tmp_path / "trainer" / "filling").iterdir()) == []


async def test_what_an_engine_beside_the_service_fetched_goes_with_its_version(
    service: Service, client: CheckpointClient, area: SharedArea, tmp_path: Path
) -> None:
    """Versions of a trainer on another host are chunks; the engine's copies of them filled the memory."""
    engine, elsewhere = StubEngine(), SharedArea(tmp_path / "trainer")
    here = receiver(engine, area, client)
    for number in range(1, 6):
        manifest = await publish(service, client, number, tensors(number), area=elsewhere)
        await here.apply(manifest, [service.url], TOKEN)
    assert sorted(area.labels()) == ["policy@1.4", "policy@1.5"]
    assert same(engine.weights, tensors(5))


async def test_a_manifest_that_could_not_be_written_is_accepted_when_it_comes_again(
    service: Service, client: CheckpointClient, area: SharedArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("physarum.weightsync.catalogue.write_whole", full_disk)
        with pytest.raises(ServiceUnreachableError, match="no room for policy@1.1"):
            await publish(service, client, 1, tensors(1), area=area, deadline_s=0.5)
    for number in (2, 3, 4):
        await publish(service, client, number, tensors(number), area=area)
    assert sorted(area.labels()) == ["policy@1.3", "policy@1.4"], "what was never accepted is not kept for ever"


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_an_answer_that_was_lost_is_asked_for_again(
    service: Service, client: CheckpointClient, area: SharedArea
) -> None:
    """The file is the service's by then: the publisher's second request finds the version."""
    put, lost = service.catalogue.put, []

    def put_then_fail(*arguments: object) -> bool:
        new = put(*arguments)  # type: ignore[arg-type]
        if not lost:
            lost.append(arguments)
            raise RuntimeError("the answer is lost")
        return new

    service.catalogue.put = put_then_fail  # type: ignore[method-assign, assignment]
    await publish(service, client, 1, tensors(1), area=area)
    assert service.sent("PUT /v1/held") == 2 and service.sent("PUT /v1/chunks") == 0


async def test_an_older_epoch_moves_nothing(service: Service, client: CheckpointClient, area: SharedArea) -> None:
    await publish(service, client, 1, tensors(1), epoch=2, area=area)
    with pytest.raises(ServiceRefusedError, match=r"policy@1\.9 is older than policy@2\.1"):
        await publish(service, client, 9, tensors(9), epoch=1, area=area)
    assert area.labels() == ["policy@2.1"] and list((area.folder / "filling").iterdir()) == []


async def test_a_service_that_is_started_anew_still_has_the_versions(tmp_path: Path, area: SharedArea) -> None:
    async with aiohttp.ClientSession() as session:
        async with running_service(tmp_path / "service", area=area) as first:
            client = CheckpointClient(first.url, TOKEN, session)
            manifest = await publish(first, client, 1, tensors(1), area=area)
        (area.folder / "held" / "policy@1.9.safetensors").write_bytes(b"no manifest names it")
        async with running_service(tmp_path / "service", area=area) as second:
            client = CheckpointClient(second.url, TOKEN, session)
            assert (await client.get_manifest("policy@1.1")) == manifest
            digest, size = next(iter(manifest.sizes().items()))
            assert len(await read_chunk(client.url, digest, size)) == size
            assert area.labels() == ["policy@1.1"]


@pytest.mark.parametrize("damage", [b"\xff" * 40, b"", None], ids=["no-header", "empty", "another-version"])
async def test_a_damaged_file_is_given_up_when_the_service_starts(
    tmp_path: Path, area: SharedArea, damage: bytes | None
) -> None:
    async with aiohttp.ClientSession() as session:
        async with running_service(tmp_path / "service", area=area) as first:
            client = CheckpointClient(first.url, TOKEN, session)
            await publish(first, client, 1, tensors(1), area=area)
            await publish(first, client, 2, {"other": tensors(1)["a"]}, area=area)
        path = area.path("policy@1.1")
        path.write_bytes(area.path("policy@1.2").read_bytes() if damage is None else damage)
        async with running_service(tmp_path / "service", area=area) as second:
            client = CheckpointClient(second.url, TOKEN, session)
            with pytest.raises(ServiceRefusedError, match="404"):
                await client.get_manifest("policy@1.1")
            await publish(second, client, 3, tensors(3), area=area)
    assert sorted(area.labels()) == ["policy@1.2", "policy@1.3"]


async def test_memory_that_is_gone_is_no_version_and_still_fences(tmp_path: Path, area: SharedArea) -> None:
    """The host was started anew: its disk is there, its memory is not."""
    async with aiohttp.ClientSession() as session:
        async with running_service(tmp_path / "service", area=area) as first:
            client = CheckpointClient(first.url, TOKEN, session)
            await publish(first, client, 5, tensors(1), area=area)
        area.give_up("policy@1.5")
        async with running_service(tmp_path / "service", keep_last=1, area=area) as second:
            client = CheckpointClient(second.url, TOKEN, session)
            with pytest.raises(ServiceRefusedError, match="404"):
                await client.get_manifest("policy@1.5")
            with pytest.raises(ServiceRefusedError, match=r"older than policy@1\.5"):
                await publish(second, client, 4, tensors(1), area=area)
            await publish(second, client, 6, tensors(1), area=area)
        assert [file.name for file in (tmp_path / "service" / "manifests").iterdir()] == ["policy@1.6.manifest"]


async def test_parts_of_a_chunk_are_answered(service: Service, client: CheckpointClient, area: SharedArea) -> None:
    manifest = await publish(service, client, 1, tensors(1), area=area)
    digest = next(iter(manifest.sizes()))
    headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=8-15"}
    whole = await read_chunk(client.url, digest, 128)
    async with client.session.get(f"{service.url}/v1/chunks/{digest}", headers=headers) as response:
        assert (response.status, response.headers["Content-Range"]) == (206, "bytes 8-15/128")
        assert await response.read() == whole[8:16]


async def test_a_version_that_is_given_up_during_an_update_is_still_applied(
    service: Service, client: CheckpointClient, area: SharedArea
) -> None:
    engine = StubEngine()
    engine.hold = asyncio.Event()
    first = await publish(service, client, 1, tensors(1), area=area)
    applying = asyncio.create_task(receiver(engine, area, client).apply(first, [service.url], TOKEN))
    async with asyncio.timeout(5.0):
        while "update" not in engine.calls:
            await asyncio.sleep(0)
    for number in (2, 3, 4):
        await publish(service, client, number, tensors(number), area=area)
    engine.hold.set()
    await applying
    assert same(engine.weights, tensors(1))
