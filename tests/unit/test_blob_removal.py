"""Removing blobs: only what is as it was listed, only what a listing can name, and readers find what was left aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from physarum.bus import blob_removal
from physarum.bus.blobs import BlobStore, digest
from physarum.bus.errors import BlobMissingError, RecordError


def test_a_sweeper_that_was_paused_takes_nothing_that_was_stored_meanwhile(tmp_path: Path) -> None:
    """Its list and its mark are from before."""
    store = BlobStore(tmp_path)
    ref = store.put(b"bytes")
    listed = blob_removal.listing(store)
    store.put(b"bytes")
    assert blob_removal.remove(store, listed) == 0
    assert store.get(ref) == b"bytes"


@pytest.mark.parametrize("name", ["../STORE", "ab/../../STORE", "STORE", "ab/.aside-../x"])
def test_a_name_that_no_listing_gives_is_refused(tmp_path: Path, name: str) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.identity()
    with pytest.raises(RecordError, match="neither a blob's digest nor a writer's aside"):
        blob_removal.remove(store, {name: 0})
    assert (tmp_path / "blobs" / "STORE").is_file()


def test_a_blob_that_a_killed_removal_left_aside_is_still_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(b"bytes")
    (tmp_path / ".swept").mkdir()
    os.rename(store.path(ref.digest), tmp_path / ".swept" / ref.digest)
    assert store.get(ref) == b"bytes"
    blob_removal.restore(store)
    assert store.path(ref.digest).is_file() and not (tmp_path / ".swept" / ref.digest).exists()
    store.delete(digest(b"bytes"))
    with pytest.raises(BlobMissingError):
        store.get(ref)
