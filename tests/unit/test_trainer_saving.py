"""Checkpoints beside training: what is recorded when, one at a time, and what a full disk does."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.retention import Retention
from physarum.actors.trainer.saving import Saving, State
from physarum.bus.ledger import DurableRecord, Ledger

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

FULL = OSError(errno.ENOSPC, "No space left on device")


class Store(Checkpoints):
    """Commits when it is let, or fails as it is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let = threading.Event()
        self.failures: list[OSError] = []

    def commit(self, aside: Path, meta: CheckpointMeta, name: str | None = None) -> tuple[str, Path]:
        assert self.let.wait(10)
        if self.failures:
            raise self.failures.pop()
        return super().commit(aside, meta, name)


class Trainer:
    """As much of one as a checkpoint needs: a step counter is its tensors."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "checkpoints")
        self.steps = 0
        self.events: list[str] = []
        self.copy_failures: list[OSError] = []
        self.write_failures: list[OSError] = []
        self.room = True
        self.crashes = False
        self.unchanged = 0
        self.saving = Saving(
            self.store,
            cast(Ledger, self),
            cast(Retention, self),
            write=self._write,
            state=self._state,
            recorded=lambda durable: self.events.append(f"offered {durable.number}"),
            wait_for_room=self._wait_for_room,
            durable=None,
            steps=0,
        )

    async def append(self, record: DurableRecord) -> int:
        if self.crashes:
            raise ConnectionError("the process ends here")
        assert (self.store.folder / record.folder / "state").read_text() == str(record.number)
        self.events.append(f"durable {record.number}")
        return 1

    async def trim(self, durable: DurableRecord) -> None:
        self.events.append(f"trimmed {durable.floor}")

    async def _write(self, aside: Path) -> Callable[[], None]:
        if self.copy_failures:
            raise self.copy_failures.pop()
        copy = str(self.steps - self.unchanged)

        def written() -> None:
            if self.write_failures:
                raise self.write_failures.pop()
            (aside / "state").write_text(copy)

        return written

    def _state(self) -> State:
        number = self.steps - self.unchanged
        meta = CheckpointMeta(epoch=1, number=number, steps=self.steps, trained_s=0.0, cursor=Cursor("x").record())
        return State(meta, floor=10 * self.steps, last_plan=self.steps)

    async def _wait_for_room(self, folder: Path, what: str) -> bool:
        self.events.append("waited for room")
        return self.room


async def test_training_goes_on_and_the_record_is_of_what_was_written(tmp_path: Path) -> None:
    trainer, done = Trainer(tmp_path), asyncio.Event()
    trainer.saving.when_done = done.set
    trainer.steps = 5
    await trainer.saving.begin()
    trainer.steps = 7
    await trainer.saving.record_done()
    assert (trainer.events, trainer.saving.steps, trainer.saving.under_way) == ([], 5, True)
    trainer.store.let.set()
    await done.wait()
    assert trainer.events == [], "only between two steps"
    await trainer.saving.record_done()
    assert trainer.events == ["durable 5", "offered 5", "trimmed 50"]
    assert not trainer.saving.under_way


async def test_one_at_a_time_and_the_present_state_at_the_end(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.store.let.set()
    for trainer.steps in (1, 2):
        await trainer.saving.begin()
    trainer.steps = 3
    assert (await trainer.saving.now()).number == 3
    assert (await trainer.saving.now()).number == 3, "it is there: nothing is written again"
    assert [one for one in trainer.events if one.startswith("durable")] == ["durable 1", "durable 2", "durable 3"]
    assert {one.name for one in trainer.store.folder.iterdir()} == {"1.1", "1.2", "1.3"}


async def test_plans_that_changed_no_weights_replace_no_checkpoint_that_the_ledger_names(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.store.let.set()
    trainer.steps = 4
    before = await trainer.saving.now()
    trainer.steps, trainer.unchanged = 6, 2
    trainer.crashes = True
    with pytest.raises(ConnectionError):
        await trainer.saving.now()
    folder, meta = trainer.store.load(before.folder, before.digest)
    assert (folder.name, meta.number, meta.steps) == ("1.4", 4, 4)
    trainer.crashes = False
    after = await trainer.saving.now()
    assert (after.folder, after.number, trainer.store.load(after.folder, after.digest)[1].steps) == ("1.4.6", 4, 6)


@pytest.mark.parametrize("where", ["write", "commit"])
async def test_a_full_disk_is_waited_for_and_leaves_nothing_half_written(tmp_path: Path, where: str) -> None:
    trainer = Trainer(tmp_path)
    trainer.store.let.set()
    (trainer.write_failures if where == "write" else trainer.store.failures).append(FULL)
    trainer.steps = 4
    assert (await trainer.saving.now()).number == 4
    assert trainer.events == ["waited for room", "durable 4", "offered 4", "trimmed 40"]
    assert [one.name for one in trainer.store.folder.iterdir()] == ["1.4"]


@pytest.mark.parametrize(("error", "room"), [(FULL, False), (OSError(errno.EIO, "Input/output error"), True)])
@pytest.mark.parametrize("where", ["write", "commit"])
async def test_what_no_room_mends_is_raised(tmp_path: Path, where: str, error: OSError, room: bool) -> None:
    trainer: Any = Trainer(tmp_path)
    trainer.room = room
    trainer.store.let.set()
    (trainer.write_failures if where == "write" else trainer.store.failures).append(error)
    with pytest.raises(OSError, match=error.strerror):
        await trainer.saving.now()
    assert trainer.events == (["waited for room"] if error is FULL else [])


async def test_a_trainer_that_lost_its_lease_and_writes_still_does_not_end_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path)
    old = store.aside(1)
    (old / "share-0000.safetensors").write_text("half")
    removed = os.rmdir

    def rmdir(path: Any, **options: Any) -> None:
        if Path(path).name == old.name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")  # a file came after it was listed
        removed(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert store.aside(2).name == ".writing-2"
    monkeypatch.undo()
    store.aside(2)
    assert [one.name for one in tmp_path.iterdir()] == [".writing-2"]
