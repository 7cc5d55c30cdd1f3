"""A version in an object store is whole or is not there, whichever write fails and however; nothing goes back."""

from __future__ import annotations

import errno
import itertools
import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from failing_store import Death, FailingFileSystem

from physarum.bus.version import Fork, Version
from physarum.weightsync.digest import digest_of
from physarum.weightsync.errors import BucketError, BucketUnfitError, ChunkAlteredError, WeightSyncError
from physarum.weightsync.manifest import Chunk, Manifest, TensorEntry
from physarum.weightsync.mirror import packing
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copied, Copying
from physarum.weightsync.mirror.record import newest_record, opened, read_record, record_key, seal, versions_in

ALONE = 64
"""Bytes of a chunk that is an object by itself, in these tests."""

Made = tuple[Manifest, dict[str, bytes]]


@pytest.fixture(params=["memory", "failing", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run" if request.param == "file" else f"{request.param}://{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    monkeypatch.setattr(packing, "ALONE_BYTES", ALONE)
    monkeypatch.setattr(packing, "PACK_BYTES", 48)
    yield
    FailingFileSystem.arm(None)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "config.json"
    path.write_text("{}")
    return {path.name: path}


def version(number: int, epoch: int = 1, changed: int = 3) -> Made:
    """Two large chunks and three small ones, of which the first `changed` differ between numbers."""
    held: dict[str, bytes] = {}
    entries = []
    for place, size in enumerate((64, 16, 80, 16, 32)):
        data = random.Random(f"{epoch}.{number} {place}" if place < changed else f"{place}").randbytes(size)
        digest = digest_of(data)
        held[digest] = data
        entries.append(TensorEntry(f"t{place}", "float32", (size // 4,), (Chunk(digest, size),)))
    manifest = Manifest(
        version=Version("policy", epoch, number),
        parent=None,
        model_digest="m",
        tensors=tuple(entries),
        total_bytes=sum(entry.size_bytes for entry in entries),
        step=number,
        created=float(number),
    )
    return manifest, held


def copying(url: str, key: str | None = None, threads: int = 1) -> Copying:
    return Copying(Bucket(url), lambda: None, key, threads)


def copy(url: str, made: Made, files: dict[str, Path], withdrawn: tuple[Fork, ...] = ()) -> Copied:
    return copying(url).copy(made[0], made[1].__getitem__, files, withdrawn)


def labels(url: str, *known: Made) -> list[str]:
    """Of those whose record can be read; then all of it can be, byte for byte."""
    bucket, found = Bucket(url), []
    for one in versions_in(bucket):
        try:
            record = read_record(bucket, one, None)
        except BucketUnfitError:
            continue
        found.append(str(one))
        held = next(chunks for manifest, chunks in known if manifest.version == one)
        for stored in record.objects:
            assert bucket.get(stored.key) == b"".join(held[digest] for digest in stored.chunks)
        for file in record.files:
            assert digest_of(bucket.get(file.key), "blake3") == file.digest
    newest = newest_record(bucket, None)
    assert newest is None or newest.manifest.label == found[-1]
    return found


def test_an_unchanged_chunk_never_moves_twice(url: str, config: dict[str, Path]) -> None:
    """Nor is it read again. A small one moves with those of its pack that changed."""
    first, second = version(1, changed=1), version(2, changed=1)
    assert copy(url, first, config) == Copied(5, 64 + 80 + (16 + 16) + 32 + 2, True)
    read: list[str] = []

    def reading(digest: str) -> bytes:
        read.append(digest)
        return second[1][digest]

    assert copying(url).copy(second[0], reading, config) == Copied(1, 64, True)
    assert read == [second[0].tensors[0].chunks[0].digest]
    assert copy(url, version(3, changed=2), config) == Copied(2, 64 + (16 + 16), True)
    assert labels(url, first, second, version(3, changed=2)) == ["policy@1.1", "policy@1.2", "policy@1.3"]
    assert copy(url, version(3, changed=2), config) == Copied(0, 0, False)  # it was there


@pytest.mark.parametrize("error", [OSError, Death])
def test_whichever_write_or_removal_fails_a_version_is_there_whole_or_not_at_all(
    config: dict[str, Path], error: type[BaseException]
) -> None:
    """Two are kept, so with the third the first goes."""
    first, second, third = (version(number) for number in (1, 2, 3))
    for fails_at in itertools.count():
        FailingFileSystem.arm(None)
        url = f"failing://{uuid.uuid4().hex}/run"
        copy(url, first, config)
        copy(url, second, config)
        FailingFileSystem.arm(fails_at, error)
        try:
            copy(url, third, config)
            gone = copying(url).retain(2)
        except (Death, WeightSyncError):
            gone = None
        FailingFileSystem.arm(None)
        if gone is not None:
            break
        assert "policy@1.2" in labels(url, first, second, third), fails_at
        copy(url, third, config)  # the next try mends it, and leaves nothing behind
        copying(url).retain(2)
        assert labels(url, first, second, third) == ["policy@1.2", "policy@1.3"]
        assert len(Bucket(url).sizes("objects")) == 2 * 3 + 2
    assert gone == ["policy@1.1"]
    assert fails_at == 3 + 1 + 1 + 3  # objects, the record; the first one's record and objects


def test_an_older_version_is_refused_and_leaves_the_newest_the_newest(url: str, config: dict[str, Path]) -> None:
    """A trainer that lost its lease. One that looked before the newer one came adds an old version, which is not the head."""
    old, new = version(9), version(5, epoch=2)
    copy(url, new, config)
    with pytest.raises(BucketUnfitError, match=r"has policy@2.5, newer than policy@1.9"):
        copy(url, old, config)
    assert labels(url, new) == ["policy@2.5"]
    bucket = Bucket(url)
    elsewhere = f"memory://{uuid.uuid4().hex}"
    copy(elsewhere, old, config)
    bucket.put(record_key(old[0].version), Bucket(elsewhere).get(record_key(old[0].version)))
    assert versions_in(bucket)[-1] == new[0].version
    assert copying(url).retain(1) == ["policy@1.9"]


def test_a_later_trainer_that_comes_while_a_copy_is_under_way_ends_it(url: str, config: dict[str, Path]) -> None:
    """The record is not written, and nothing of the later one's is let go."""
    old, new = version(9), version(5, epoch=2)

    def reading(digest: str) -> bytes:
        if not versions_in(Bucket(url)):
            copy(url, new, config)
        return old[1][digest]

    with pytest.raises(BucketUnfitError, match=r"has policy@2.5, newer than policy@1.9"):
        copying(url).copy(old[0], reading, config)
    assert labels(url, new) == ["policy@2.5"]


def test_another_run_of_the_same_name_is_told(url: str, config: dict[str, Path]) -> None:
    copy(url, version(1), config)
    other = version(1, changed=0)
    with pytest.raises(BucketUnfitError, match="with other content: another run of this name did"):
        copy(url, other, config)


def test_what_was_withdrawn_goes_first(url: str, config: dict[str, Path]) -> None:
    good, bad, new = version(1), version(2), version(1, epoch=2)
    copy(url, good, config)
    copy(url, bad, config)
    copy(url, new, config, withdrawn=(Fork(1, 1),))
    assert read_record(Bucket(url), new[0].version, None).withdrawn == (Fork(1, 1),)
    assert copying(url).retain(2) == ["policy@1.2"]
    assert labels(url, good, new) == ["policy@1.1", "policy@2.1"]


def test_an_object_that_was_lost_is_sent_again_with_the_next_version(url: str, config: dict[str, Path]) -> None:
    first = version(1, changed=1)
    copy(url, first, config)
    bucket = Bucket(url)
    lost = read_record(bucket, first[0].version, None).objects[1]
    bucket.remove(lost.key)
    assert copy(url, version(2, changed=1), config) == Copied(2, 64 + 80, True)
    assert labels(url, first, version(2, changed=1)) == ["policy@1.1", "policy@1.2"]


def test_altered_bytes_of_this_host_get_no_name(url: str, config: dict[str, Path]) -> None:
    manifest, held = version(1)
    damaged = {digest: b"\0" * len(data) for digest, data in held.items()}
    with pytest.raises(ChunkAlteredError, match="in this host's memory"):
        copy(url, (manifest, damaged), config)
    assert versions_in(Bucket(url)) == []


def test_while_a_record_cannot_be_read_no_object_goes(url: str, config: dict[str, Path]) -> None:
    """Nobody knows what it needs. It is written again, or goes when it is old."""
    first, second, third = (version(number) for number in (1, 2, 3))
    for one in (first, second):
        copy(url, one, config)
    bucket = Bucket(url)
    bucket.put(record_key(first[0].version), b"damaged")
    before = bucket.sizes("objects")
    with pytest.raises(BucketUnfitError, match="is no record"):
        copying(url).retain(2)
    assert bucket.sizes("objects") == before
    copy(url, third, config)
    assert copying(url).retain(2) == ["policy@1.1"]
    assert labels(url, second, third) == ["policy@1.2", "policy@1.3"]
    assert len(bucket.sizes("objects")) == 2 * 3 + 2
    bucket.put(record_key(third[0].version), b"damaged")
    assert copy(url, third, config) == Copied(0, 0, True)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    tmp_path: Path, config: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error of a shared file system in the middle of letting go: every object of every version went."""
    url, first, second = f"file://{tmp_path}/bucket/run", version(1), version(2)
    list_folder, looks = os.scandir, itertools.count()

    def failing(path: str) -> object:
        if str(path).endswith("versions") and next(looks) == fails_at:
            raise OSError(errno.EIO, "Input/output error", path)
        return list_folder(path)

    for one in (first, second):
        copy(url, one, config)
    monkeypatch.setattr(os, "scandir", failing)
    for fails_at in range(4):
        looks = itertools.count()
        with pytest.raises(BucketError, match="Input/output error"):
            copying(url).retain(2)
        assert labels(url, first, second) == ["policy@1.1", "policy@1.2"], fails_at


def test_a_listing_that_lacks_a_version_lets_nothing_of_it_go(
    url: str, config: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that lists late may leave a record out of one listing of several."""
    first, second, list_all, looks = version(1), version(2), Bucket.sizes, itertools.count()

    def listed(bucket: Bucket, below: str) -> dict[str, int]:
        found = list_all(bucket, below)
        return {} if below == "versions" and next(looks) == late_at else found

    for one in (first, second):
        copy(url, one, config)
    for late_at in range(4):
        looks = itertools.count()
        with monkeypatch.context() as patched:
            patched.setattr(Bucket, "sizes", listed)
            copying(url).retain(2)
        assert labels(url, first, second) == ["policy@1.1", "policy@1.2"], late_at


def test_a_store_that_gives_back_something_else_is_not_believed(
    config: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"failing://{uuid.uuid4().hex}/run"
    with monkeypatch.context() as patch:
        patch.setattr(FailingFileSystem, "pipe_file", lambda self, path, value, **options: None)
        with pytest.raises(BucketUnfitError, match="does not list it"):
            copy(url, version(1), config)
    copy(url, version(1), config)
    with monkeypatch.context() as patch:
        patch.setattr(FailingFileSystem, "pipe_file", lambda self, path, value, **options: None)
        with pytest.raises(BucketUnfitError, match=r"took objects/.* and does not list it"):
            copy(url, version(2), config)
    assert labels(url, version(1)) == ["policy@1.1"]


def test_errors_of_a_client_are_told_with_the_object(config: dict[str, Path]) -> None:
    url = f"failing://{uuid.uuid4().hex}/run"
    FailingFileSystem.arm(0, PermissionError)
    with pytest.raises(BucketError, match=rf"{url}/objects/../b3-[0-9a-f]+: PermissionError"):
        copy(url, version(1), config)


def test_a_record_says_who_wrote_it_where_there_is_a_key(url: str, config: dict[str, Path]) -> None:
    made = version(1)
    copying(url, key="secret").copy(made[0], made[1].__getitem__, config)
    bucket, name = Bucket(url), record_key(made[0].version)
    record = read_record(bucket, made[0].version, "secret")
    for key, found in ((None, "sealed with a key"), ("other", "does not have the seal")):
        with pytest.raises(BucketUnfitError, match=found):
            read_record(bucket, made[0].version, key)
    bucket.put(name, seal(record, None))  # by somebody who may write there, and has no key
    with pytest.raises(BucketUnfitError, match="sealed with no key"):
        read_record(bucket, made[0].version, "secret")
    assert opened(seal(record, None), "here", None) == record
    bucket.put(record_key(Version("policy", 7, 7)), seal(record, "secret"))
    with pytest.raises(BucketUnfitError, match=r"is of policy@1.1: it was renamed"):
        read_record(bucket, Version("policy", 7, 7), "secret")


def test_side_by_side_it_is_the_same(url: str, config: dict[str, Path]) -> None:
    made = version(1)
    assert copying(url, threads=4).copy(made[0], made[1].__getitem__, config).objects == 5
    assert labels(url, made) == ["policy@1.1"]
