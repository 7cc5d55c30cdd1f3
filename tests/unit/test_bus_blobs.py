"""Blobs: durable before they are named, verified whenever they are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from physarum.bus.blobs import BlobRef, BlobStore, digest
from physarum.bus.codec import decode, encode
from physarum.bus.errors import BlobAlteredError, BlobMissingError, CodecError, RecordError

DATA = b"routed experts" * 1000


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_put_is_got_and_the_same_bytes_are_stored_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(DATA)
    assert ref == store.put(DATA) == BlobRef(digest(DATA), len(DATA))
    assert store.get(ref) == DATA
    assert files(tmp_path) == [tmp_path / ref.digest[:2] / ref.digest]


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else f"file of {os.fstat(handle).st_size}"
        calls.append(f"fsync {kind}")
        fsync(handle)

    def watched_replace(source: str, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    BlobStore(tmp_path).put(DATA)
    assert calls == ["fsync folder", f"fsync file of {len(DATA)}", "rename", "fsync folder"]


def test_a_blob_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BlobMissingError, match=f"blob {digest(DATA)} .* is not in {tmp_path}"):
        BlobStore(tmp_path).get(BlobRef(digest(DATA), len(DATA)))


def test_altered_bytes_are_noticed_whenever_they_are_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(DATA)
    files(tmp_path)[0].write_bytes(b"R" + DATA[1:])
    with pytest.raises(BlobAlteredError, match="its bytes were altered"):
        store.get(ref)


def test_a_blob_cut_short_is_healed_by_storing_it_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(DATA)
    files(tmp_path)[0].write_bytes(DATA[:10])
    assert store.put(DATA) == ref
    assert store.get(ref) == DATA


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = BlobStore(tmp_path)
    (tmp_path / digest(DATA)[:2]).mkdir()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            store.put(DATA)
    assert files(tmp_path) == []
    assert store.get(store.put(DATA)) == DATA


def test_a_write_that_the_disk_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real refusal of the system, at write: the process's file size limit."""
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            BlobStore(tmp_path).put(DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert files(tmp_path) == []


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "/etc/passwd", "A" * 32, "a" * 31, "a" * 32 + "\n"])
def test_a_reference_that_is_no_digest_never_becomes_a_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecordError, match="is not 32 lower-case hex digits"):
        BlobRef(text, 1)
    with pytest.raises(RecordError):
        BlobStore(tmp_path).delete(text)
    good = encode(BlobRef("a" * 32, 1))
    with pytest.raises(CodecError):
        decode(good.replace(b"a" * 32, b"/" * 32), BlobRef)


def test_deleting_twice_is_no_error(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(DATA)
    store.delete(ref.digest)
    store.delete(ref.digest)
    with pytest.raises(BlobMissingError):
        store.get(ref)
