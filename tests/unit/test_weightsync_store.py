"""Chunks are whole or absent; manifests only move forward, survive a restart, and always have their chunks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from physarum.bus.version import Version
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.digest import digest_of
from physarum.weightsync.durable import ASIDE_PREFIX, write_whole
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    ChunksAbsentError,
    ManifestError,
    StaleVersionError,
)
from physarum.weightsync.manifest import Chunk, Manifest, TensorEntry

HOUR_S = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


@pytest.fixture
def catalogue(tmp_path: Path, store: ChunkStore) -> Catalogue:
    return Catalogue(tmp_path / "manifests", store)


def put(store: ChunkStore, data: bytes) -> str:
    digest = digest_of(data)
    store.put(digest, data)
    return digest


def manifest(number: int, data: bytes, epoch: int = 1, created: float = 0.0) -> Manifest:
    tensor = TensorEntry("w", "uint8", (len(data),), (Chunk(digest_of(data), len(data)),))
    version = Version("policy", epoch, number)
    return Manifest(
        version=version,
        parent=None,
        model_digest="m",
        tensors=(tensor,),
        total_bytes=len(data),
        step=0,
        created=created,
    )


def test_put_verifies_before_the_name_exists(store: ChunkStore) -> None:
    digest = digest_of(b"right")
    with pytest.raises(ChunkAlteredError):
        store.put(digest, b"wrong")
    assert not store.has(digest) and store.missing([digest]) == [digest]
    assert store.put(digest, b"right") and not store.put(digest, b"right")
    assert store.read(digest) == b"right" and store.size(digest) == 5


def test_altered_file_is_found_on_read_and_can_be_sent_anew(store: ChunkStore) -> None:
    digest = put(store, b"right")
    store.path(digest).write_bytes(b"wrong")
    with pytest.raises(ChunkAlteredError, match=str(store.path(digest))):
        store.read(digest)
    with pytest.raises(ChunkMissingError):
        store.read(digest)
    assert store.put(digest, b"right")


def test_a_name_that_is_no_digest_never_becomes_a_path(store: ChunkStore) -> None:
    with pytest.raises(ChunkMissingError, match="is no digest"):
        store.path("../../etc/passwd")


def test_interrupted_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, [b"old"], fsync=True)

    def parts() -> object:
        yield b"ne"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(file, parts(), fsync=True)  # type: ignore[arg-type]
    assert file.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_rubbish_of_a_killed_writer_is_removed_at_start(store: ChunkStore) -> None:
    rubbish = store.folder / "00" / f"{ASIDE_PREFIX}x"
    rubbish.write_bytes(b"half")
    ChunkStore(store.folder)
    assert not rubbish.exists()


def test_sweep_keeps_the_live_and_the_young(store: ChunkStore) -> None:
    live, young, old, asked = (put(store, data) for data in (b"live", b"young", b"oldest", b"asked"))
    past = time.time() - HOUR_S
    for digest in (live, old, asked):
        os.utime(store.path(digest), (past, past))
    assert store.missing([asked]) == []
    assert store.sweep([live], grace_s=60) == len(b"oldest")
    assert [store.has(digest) for digest in (live, young, old, asked)] == [True, True, False, True]


def test_manifest_without_its_chunks_is_refused(catalogue: Catalogue, store: ChunkStore) -> None:
    absent = digest_of(b"data")
    with pytest.raises(ChunksAbsentError, match="names 1 chunks that are not here") as caught:
        catalogue.put(manifest(1, b"data"))
    assert caught.value.digests == [absent]
    put(store, b"data")
    assert catalogue.put(manifest(1, b"data"))


def test_versions_only_move_forward(catalogue: Catalogue, store: ChunkStore) -> None:
    for data in (b"a", b"b"):
        put(store, data)
    catalogue.put(manifest(7, b"a", epoch=1))
    catalogue.put(manifest(5, b"a", epoch=2))
    with pytest.raises(StaleVersionError, match=r"policy@1\.8 is older than policy@2\.5"):
        catalogue.put(manifest(8, b"b", epoch=1))
    with pytest.raises(ManifestError, match="was accepted with other content"):
        catalogue.put(manifest(5, b"b", epoch=2))
    assert not catalogue.put(manifest(7, b"a", epoch=1, created=99.0))
    newest = catalogue.newest("policy")
    assert newest is not None and newest.label == "policy@2.5"
    assert catalogue.newest("other") is None and catalogue.get("nonsense") is None


def test_manifests_survive_a_restart(catalogue: Catalogue, store: ChunkStore) -> None:
    put(store, b"a")
    catalogue.put(manifest(1, b"a"))
    again = Catalogue(catalogue.folder, ChunkStore(store.folder))
    assert again.all() == catalogue.all() == [manifest(1, b"a")]


def test_renamed_or_broken_manifest_is_named_at_start(catalogue: Catalogue, store: ChunkStore) -> None:
    put(store, b"a")
    catalogue.put(manifest(1, b"a"))
    file = catalogue.folder / "policy@1.1.manifest"
    file.rename(catalogue.folder / "policy@1.9.manifest")
    with pytest.raises(ManifestError, match=r"holds policy@1\.1; it was renamed"):
        Catalogue(catalogue.folder, store)
    (catalogue.folder / "policy@1.9.manifest").write_bytes(b"\xc1")
    with pytest.raises(ManifestError, match="is no manifest"):
        Catalogue(catalogue.folder, store)


def test_retention_keeps_the_newest_the_protected_and_what_they_share(catalogue: Catalogue, store: ChunkStore) -> None:
    contents = {1: b"first", 2: b"second", 3: b"first", 4: b"fourth"}
    for number, data in contents.items():
        put(store, data)
        catalogue.put(manifest(number, data))
    put(store, b"nobody's")
    freed = catalogue.retain(1, protected={"policy@1.3"}, grace_s=-1)
    assert [held.version.number for held in catalogue.all()] == [3, 4]
    assert store.missing(map(digest_of, contents.values())) == [digest_of(b"second")]
    assert freed == len(b"second") + len(b"nobody's")
    with pytest.raises(ValueError, match="keep_last is 0"):
        catalogue.retain(0)
