"""An object store as one more holder: where the service fails it gives the chunks, and what it gives is verified."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from checkpoint_service import TOKEN, Service, publish, running_service, tensors
from test_weightsync_receiver import StubEngine

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import (
    BucketError,
    ChunkAlteredError,
    ChunkMissingError,
    ObjectAbsentError,
    ServiceUnreachableError,
)
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.mirror import apart
from physarum.weightsync.mirror.apart import BucketApart
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copying
from physarum.weightsync.mirror.reading import Mirror
from physarum.weightsync.mirror.record import read_record
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


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run/weights"


@pytest.fixture
def reading(url: str) -> Iterator[BucketApart]:
    """By a process of its own, as engines read."""
    made = BucketApart(url, 20.0)
    yield made
    made.close()


class Engine:
    def __init__(self, folder: Path, session: aiohttp.ClientSession, objects: BucketApart) -> None:
        self.stub = StubEngine()
        self.receiver = Receiver(
            self.stub,
            Staging(SharedArea(folder / "area"), "engine-0"),
            session,
            live=Version("policy", 1, 0),
            mirror=Mirror(objects, None),
        )


@pytest.fixture
def engine(tmp_path: Path, session: aiohttp.ClientSession, reading: BucketApart) -> Engine:
    return Engine(tmp_path, session, reading)


async def mirrored(
    service: Service, session: aiohttp.ClientSession, url: str, number: int, named: dict[str, torch.Tensor]
) -> Manifest:
    """A version that the service has, and the store."""
    manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), number, named)
    Copying(Bucket(url), lambda: None, None, 1).copy(manifest, service.store.read, {})
    return manifest


async def test_without_any_service_the_engine_gets_all_from_the_store_and_then_what_changed(
    service: Service, session: aiohttp.ClientSession, url: str, engine: Engine
) -> None:
    first = await mirrored(service, session, url, 1, tensors(1))
    record = await engine.receiver.apply(first, [], None)
    assert record.bytes_fetched == first.total_bytes
    second = await mirrored(service, session, url, 2, tensors(2, changed=1))
    record = await engine.receiver.apply(second, [], None)
    assert 0 < record.bytes_fetched < second.total_bytes
    assert all(torch.equal(engine.stub.weights[name], tensor) for name, tensor in tensors(2, changed=1).items())
    assert service.sent("GET /v1/chunks/") == 0


async def test_a_service_that_gives_no_chunks_costs_nothing_but_the_way_to_the_store(
    service: Service, session: aiohttp.ClientSession, url: str, engine: Engine
) -> None:
    manifest = await mirrored(service, session, url, 1, tensors(1))
    service.before = lambda request: web.Response(status=500) if "/chunks/" in request.path else None
    record = await engine.receiver.apply(manifest, [service.url], TOKEN)
    assert record.bytes_fetched == manifest.total_bytes and service.sent("GET /v1/chunks/") > 0
    assert all(torch.equal(engine.stub.weights[name], tensor) for name, tensor in tensors(1).items())


async def test_the_store_is_asked_last(
    service: Service, session: aiohttp.ClientSession, tmp_path: Path, engine: Engine
) -> None:
    manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, tensors(1))
    await engine.receiver.apply(manifest, [service.url], TOKEN)
    assert not (tmp_path / "bucket").exists()


@pytest.mark.parametrize("damage", ["altered", "missing", "no record", "of another run"])
async def test_damage_there_is_told_and_the_engine_goes_on_as_it_was(
    service: Service, session: aiohttp.ClientSession, url: str, engine: Engine, damage: str
) -> None:
    manifest = await mirrored(service, session, url, 1, tensors(1))
    bucket = Bucket(url)
    [stored] = read_record(bucket, manifest.version, None).objects  # all of it is small
    expected: type[Exception] = ChunkMissingError
    if damage == "altered":
        bucket.put(stored.key, bytes(stored.size))
        expected = ChunkAlteredError
    elif damage == "missing":
        bucket.remove(stored.key)
    elif damage == "no record":
        bucket.remove("versions/policy@1.1.version")
    else:
        await publish_again(service, session, url)
        manifest = await publish(service, CheckpointClient(service.url, TOKEN, session), 2, tensors(5))
    with pytest.raises(expected):
        await engine.receiver.apply(manifest, [], None)
    assert engine.stub.calls == [] and engine.receiver.quarantined is None
    assert (engine.receiver.checksum_failures > 0) == (damage == "altered")
    await engine.receiver.apply(manifest, [service.url], TOKEN)


async def publish_again(service: Service, session: aiohttp.ClientSession, url: str) -> None:
    """The store's version 2 is not the one that the service will have."""
    other = await publish(service, CheckpointClient(service.url, TOKEN, session), 1, tensors(1))
    foreign = Manifest(
        **{**{name: getattr(other, name) for name in Manifest.__struct_fields__}, "version": Version("policy", 1, 2)}
    )
    Copying(Bucket(url), lambda: None, None, 1).copy(foreign, service.store.read, {})


async def test_a_silent_store_ends_at_the_deadline_and_its_process_with_it(
    service: Service, session: aiohttp.ClientSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    reading = BucketApart(url, 0.3)
    engine = Engine(tmp_path, session, reading)
    manifest = await mirrored(service, session, url, 1, tensors(1))
    began = time.monotonic()
    with pytest.raises(ServiceUnreachableError, match=r"silent for 0.3 s; .*checkpoint.versions.timeout_s"):
        await engine.receiver.apply(manifest, [], None)
    assert time.monotonic() - began < 5
    assert engine.stub.calls == [] and reading._process is None


OWNER = """
import sys
from physarum.weightsync.mirror.apart import BucketApart
bucket = BucketApart(sys.argv[1], 20.0)
bucket.sizes("versions")
print(bucket._process.popen.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_its_owner_however_that_ends(url: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    reader = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone, _ = psutil.wait_procs([reader], timeout=20)
    assert gone == [reader]


async def test_a_process_that_dies_fails_what_was_asked_and_the_next_call_starts_another(
    service: Service, session: aiohttp.ClientSession, url: str, reading: BucketApart
) -> None:
    manifest = await mirrored(service, session, url, 1, tensors(1))
    assert reading.sizes("versions") == Bucket(url).sizes("versions")
    assert reading._process is not None
    first = reading._process.popen
    asked = reading._process.ask("get", "versions/policy@1.1.version")
    assert asked.result(20)[0] == 0
    first.kill()
    first.wait()
    with suppress(BucketError, ObjectAbsentError):  # asked of the dead one, or of the next, as the thread was told
        reading.get("nothing")
    with pytest.raises(ObjectAbsentError, match="nothing is not there"):
        reading.get("nothing")
    assert Mirror(reading, None).newest().manifest == manifest  # type: ignore[union-attr]
    assert reading._process is not None and reading._process.popen.pid != first.pid
