"""Blobs of actors with and without the run's folder, over a real bus and real HTTP: copies, repairs, deadlines, waits."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from pathlib import Path

import pytest
from actor_fixture import eventually
from blob_fixture import TOKEN, TOKEN_ENV, access, announced_store, never
from bus_fixture import DEADLINE_S

from physarum.bus import blob_access
from physarum.bus.blobs import BlobRef, BlobStore
from physarum.bus.connection import Bus
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobNoRoomError,
    BlobReplicasError,
    BlobUnreachableError,
)
from physarum.bus.publisher import Publisher

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

DATA = random.Random(1).randbytes(1 << 20)
REF = BlobRef.of(DATA)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "STORE")


async def test_an_actor_without_the_runs_folder_writes_and_reads_over_http(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    async with announced_store(tmp_path / "a", bus, publisher) as store:
        here, there = access(bus, tmp_path / "a"), access(bus, tmp_path / "b")
        assert await there.put(DATA, never()) == REF
        assert await here.get(REF) == DATA
        assert store.count("PUT") == 1 and store.count("GET") == 0, "the folder's own machine needs no HTTP"
        assert names(tmp_path / "b") == [REF.digest] and not (tmp_path / "b" / "blobs").exists(), "a cached copy only"
        assert await there.get(REF) == DATA and store.count("GET") == 0
        assert await access(bus, tmp_path / "c").get(REF) == DATA and store.count("GET") == 1


async def test_the_folders_own_machine_needs_no_checkpoint_actor(tmp_path: Path, bus: Bus) -> None:
    """A checkpoint actor that was killed stops nobody who has the folder."""
    BlobStore(tmp_path / "blobs").identity()
    blobs = access(bus, tmp_path)
    assert await blobs.get(await blobs.put(DATA, never())) == DATA
    with pytest.raises(BlobMissingError, match="is not in") as caught:
        await blobs.get(BlobRef.of(b"other"))
    assert not isinstance(caught.value, BlobUnreachableError)


async def test_an_altered_cached_copy_is_fetched_again(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    async with announced_store(tmp_path / "a", bus, publisher) as store:
        there = access(bus, tmp_path / "b", access="http")
        await there.put(DATA, never())
        (tmp_path / "b" / "cache" / REF.digest).write_bytes(b"R" + DATA[1:])
        assert await there.get(REF) == DATA and store.count("GET") == 1
        assert (tmp_path / "b" / "cache" / REF.digest).read_bytes() == DATA


async def test_a_write_is_acknowledged_when_both_stores_have_it(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    async with (
        announced_store(tmp_path / "a", bus, publisher, "checkpoint-0") as first,
        announced_store(tmp_path / "b", bus, publisher, "checkpoint-1") as second,
    ):
        for folder in (tmp_path / "a", tmp_path / "elsewhere"):  # with a store of its own, and without one
            data = DATA + folder.name.encode()
            ref = await access(bus, folder, replicas=2).put(data, never())
            assert first.store.get(ref) == second.store.get(ref) == data


@pytest.mark.parametrize("fault", ["missing", "altered"])
@pytest.mark.parametrize("reader", ["a", "elsewhere"])
async def test_a_copy_that_is_lost_is_read_from_the_other_store_and_repaired(
    tmp_path: Path, bus: Bus, publisher: Publisher, fault: str, reader: str
) -> None:
    async with (
        announced_store(tmp_path / "a", bus, publisher, "checkpoint-0") as first,
        announced_store(tmp_path / "b", bus, publisher, "checkpoint-1"),
    ):
        both = [DATA + bytes([number]) for number in range(8)]
        for data in both:
            path = first.store.path((await access(bus, tmp_path / "a", replicas=2).put(data, never())).digest)
            path.unlink() if fault == "missing" else path.write_bytes(b"R" + data[1:])
        blobs = access(bus, tmp_path / reader, replicas=2, cache_bytes=0)
        for data in both:
            asked = first.count("GET")
            assert await blobs.get(BlobRef.of(data)) == data
            if reader == "a" or first.count("GET") > asked:
                assert first.store.get(BlobRef.of(data)) == data, "repaired before the reader got it"
        assert (first.count("GET") > 0) is (reader == "elsewhere"), "the folder is looked into without HTTP"


async def test_a_store_that_hangs_costs_one_deadline_and_the_other_one_is_asked(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """A checkpoint actor that was stopped (SIGSTOP) still accepts connections and says nothing."""
    async with (
        announced_store(tmp_path / "a", bus, publisher, "checkpoint-0") as first,
        announced_store(tmp_path / "b", bus, publisher, "checkpoint-1"),
    ):
        blobs = access(bus, tmp_path / "elsewhere", replicas=2, cache_bytes=0, timeout_s=0.5)
        ref = await blobs.put(b"small", never())
        hanging = asyncio.Event()
        first.hold = hanging.wait
        clock = asyncio.get_running_loop().time
        began = clock()
        assert await blobs.get(ref) == b"small"
        assert 0.5 <= clock() - began < 1.5
        hanging.set()


async def test_altered_everywhere_is_named_and_nothing_is_returned(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    async with announced_store(tmp_path / "a", bus, publisher) as store:
        ref = store.store.put(DATA)
        store.store.path(ref.digest).write_bytes(b"R" + DATA[1:])
        for folder in ("a", "elsewhere"):
            with pytest.raises(BlobAlteredError, match=f"blob {ref.digest}"):
                await access(bus, tmp_path / folder).get(ref)


async def test_fewer_stores_than_asked_for_is_an_error_with_numbers_and_nothing_is_lost(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    async with announced_store(tmp_path / "a", bus, publisher) as store:
        blobs = access(bus, tmp_path / "a", replicas=2, timeout_s=0.5)
        with pytest.raises(
            BlobReplicasError, match=r"on disk in 1 of 2 stores .* announced: checkpoint-0;.*checkpoint.count"
        ):
            await blobs.put(DATA, never())
        assert store.store.get(REF) == DATA, "what was stored counts when the second store is there"
        async with announced_store(tmp_path / "b", bus, publisher, "checkpoint-1") as second:
            await blobs.put(DATA, never())
            assert second.store.get(REF) == DATA


async def test_a_store_that_comes_late_is_waited_for(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    BlobStore(tmp_path / "a" / "blobs").put(DATA)
    other = DATA[::-1]
    writing = asyncio.create_task(access(bus, tmp_path / "b", access="http").put(other, never()))
    reading = asyncio.create_task(access(bus, tmp_path / "c", access="http").get(REF))
    await asyncio.wait({writing, reading}, timeout=0.3)
    assert not writing.done() and not reading.done()
    async with announced_store(tmp_path / "a", bus, publisher) as store, asyncio.timeout(DEADLINE_S):
        assert await reading == DATA
        assert store.store.get(await writing) == other


async def test_no_store_at_all_is_named_at_the_deadline(tmp_path: Path, bus: Bus) -> None:
    blobs = access(bus, tmp_path, access="http", timeout_s=0.3)
    with pytest.raises(BlobUnreachableError, match="no checkpoint actor has announced a store"):
        await blobs.get(REF)
    with pytest.raises(BlobReplicasError, match=r"on disk in 0 of 1 stores .* announced: none"):
        await blobs.put(DATA, never())


async def test_a_writer_waits_while_the_disk_of_the_store_is_full(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_access, "_NO_ROOM_S", 0.1)
    async with announced_store(tmp_path / "a", bus, publisher) as store:
        blobs = access(bus, tmp_path / "b", access="http")
        with monkeypatch.context() as patch:

            def full(*arguments: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr("physarum.bus.blobs.Incoming.write", full)
            writing = asyncio.create_task(blobs.put(DATA, never()))
            await eventually(lambda: store.count("PUT") >= 3)
            assert not writing.done()
            stop = asyncio.Event()
            stop.set()
            with pytest.raises(BlobNoRoomError, match="507"):
                await blobs.put(DATA, stop)
        async with asyncio.timeout(DEADLINE_S):
            assert await writing == REF
        assert store.store.get(REF) == DATA


async def test_a_blob_whose_message_waits_is_kept_young(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full stream may hold its publisher for longer than the grace."""
    monkeypatch.setattr(blob_access, "_LEAST_KEEP_S", 0.05)
    BlobStore(tmp_path / "blobs").identity()
    blobs = access(bus, tmp_path, grace_s=0.15)
    async with blobs.held(DATA, never()) as ref:
        path = BlobStore(tmp_path / "blobs").path(ref.digest)
        path.unlink()
        await eventually(path.is_file)
        os.utime(path, (0, 0))
        await eventually(lambda: path.stat().st_mtime > time.time() - DEADLINE_S)
