"""The cache of blobs from other machines: bounded in bytes, verified, and never an error of its owner's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from physarum.bus.blob_cache import BlobCache
from physarum.bus.blobs import BlobRef


def test_it_stays_below_its_bytes_and_the_unused_go_first(tmp_path: Path) -> None:
    """900 bytes are there and 300 come: 300 must go to have room, 100 would do to be at four fifths of 1000."""
    cache = BlobCache(tmp_path, limit_bytes=1000)
    data = [bytes([number]) * 300 for number in range(4)]
    for number, one in enumerate(data[:3]):
        cache.put(BlobRef.of(one), one)
        os.utime(tmp_path / BlobRef.of(one).digest, ns=(number, number))
    assert cache.get(BlobRef.of(data[0])) == data[0]  # young again
    cache.put(BlobRef.of(data[3]), data[3])
    assert [cache.get(BlobRef.of(one)) is not None for one in data] == [True, False, True, True]
    big = bytes(1001)
    cache.put(BlobRef.of(big), big)
    assert cache.get(BlobRef.of(big)) is None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 900


def test_a_new_process_counts_what_is_there(tmp_path: Path) -> None:
    first, second = bytes(600), bytes(601)
    BlobCache(tmp_path, limit_bytes=1000).put(BlobRef.of(first), first)
    again = BlobCache(tmp_path, limit_bytes=1000)
    again.put(BlobRef.of(second), second)
    assert again.get(BlobRef.of(first)) is None and again.get(BlobRef.of(second)) == second


def test_without_bytes_nothing_is_kept(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", limit_bytes=0)
    cache.put(BlobRef.of(b"x"), b"x")
    assert cache.get(BlobRef.of(b"x")) is None and not (tmp_path / "cache").exists()


def test_a_full_disk_empties_the_cache_and_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlobCache(tmp_path / "cache", limit_bytes=1000)
    cache.put(BlobRef.of(b"x"), b"x")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        cache.put(BlobRef.of(b"y"), b"y")
    assert not (tmp_path / "cache").exists() and cache.get(BlobRef.of(b"x")) is None
    cache.put(BlobRef.of(b"y"), b"y")
    assert cache.get(BlobRef.of(b"y")) == b"y"
