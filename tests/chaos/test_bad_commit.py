"""The disk is full at some write of a checkpoint's commit: the checkpoint before stays whole, whichever write it was."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from physarum.actors.trainer import checkpoints as module
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.bus import room

pytestmark = pytest.mark.chaos

EPOCH = 3


def meta(number: int) -> CheckpointMeta:
    return CheckpointMeta(epoch=EPOCH, number=number, steps=number, trained_s=1.0, cursor=Cursor("created").record())


def write(store: Checkpoints, number: int) -> tuple[str, Path]:
    aside = store.aside(EPOCH)
    (aside / "rank0.safetensors").write_bytes(bytes([number]) * 1000)
    return store.commit(aside, meta(number))


class FullAt:
    """The disk has room for `allowed` more operations."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed

    def guard(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*arguments, **options)

        return guarded


def test_a_full_disk_at_any_write_of_a_commit_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    digest, old = write(store, 1)
    for allowed in itertools.count():
        disk = FullAt(allowed)
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((Path, "write_bytes"), (module, "_fsync"), (module, "fsync_folder"), (os, "replace")):
                patch.setattr(owner, name, disk.guard(getattr(owner, name)))
            try:
                write(store, 2)
            except OSError as error:
                assert room.is_full(error)
            else:
                break
        assert store.load(old.name, digest)[1] == meta(1)
    assert allowed >= 7  # the state, meta and digests; each of the three fsynced; folder, rename, folder
    assert store.load(old.name, digest)[1] == meta(1)
    digest, new = write(store, 2)
    assert store.load(new.name, digest)[1] == meta(2)
