"""Checkpoints: the state is copied while training stands still, written and made durable while it goes on.

    training   step | copy | step | step | record | step ...
    threads                 write, digest, fsync, rename

Training waits for a copy in host memory; a checkpoint that is due while the one before is under way waits for that one.
Invariant: `durable` is recorded after all of it is on disk and between two steps, so that the ledger has one writer. A crash
leaves the checkpoint before.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.retention import Retention
from physarum.bus import room
from physarum.bus.ledger import DurableRecord, Ledger

_log = logging.getLogger(__name__)

_WHAT = "a checkpoint"


class State(NamedTuple):
    """What belongs to a checkpoint besides tensors, as it was when they were written. `floor`, `last_plan`: of the cursor."""

    meta: CheckpointMeta
    floor: int
    last_plan: int


class _UnderWay(NamedTuple):
    state: State
    aside: Path
    committed: asyncio.Task[tuple[str, Path]]


class WaitForRoom(Protocol):
    """Waits while a disk is full; False when asked to drain."""

    async def __call__(self, folder: Path, what: str) -> bool: ...


class Saving:
    """One trainer's. `write` copies the tensors and begins to write them into a folder; what it returns waits, in any thread,
    until they are written; `state` tells the rest; `recorded` hears of what is durable."""

    def __init__(
        self,
        store: Checkpoints,
        book: Ledger,
        retention: Retention,
        *,
        write: Callable[[Path], Awaitable[Callable[[], None]]],
        state: Callable[[], State],
        recorded: Callable[[DurableRecord], None],
        wait_for_room: WaitForRoom,
        durable: DurableRecord | None,
        steps: int,
    ) -> None:
        self._store, self._book, self._retention = store, book, retention
        self._write, self._state, self._recorded, self._wait_for_room = write, state, recorded, wait_for_room
        self._durable, self._durable_steps = durable, steps
        self._under_way: _UnderWay | None = None
        self.when_done: Callable[[], None] = lambda: None
        """Called when one is on disk and can be recorded."""

    @property
    def steps(self) -> int:
        """Steps that the newest checkpoint holds, also one that is under way."""
        return self._durable_steps if self._under_way is None else self._under_way.state.meta.steps

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    async def begin(self) -> None:
        """Copies the state as it is, once the one before is recorded, and goes on making it durable."""
        await self.settle()
        while True:
            try:
                self._under_way = await self._begun()
            except OSError as error:
                await self._needs_room(error)
            else:
                return

    async def now(self) -> DurableRecord:
        """The state as it is, recorded as durable."""
        while True:
            await self.settle()
            if self._durable is not None and self._durable_steps == self._state().meta.steps:
                return self._durable
            await self.begin()

    async def record_done(self) -> None:
        """Records the one under way if it is on disk; waits for nothing."""
        if self._under_way is not None and self._under_way.committed.done():
            await self.settle()

    async def settle(self) -> None:
        """Waits for the one under way and records it. One that found no room is given up, once there is room again."""
        if self._under_way is None:
            return
        state, aside, committed = self._under_way
        try:
            digest, folder = await asyncio.shield(committed)
        except OSError as error:
            self._under_way = None
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)  # others need the room that it takes
            await self._needs_room(error)
            return
        durable = DurableRecord(
            epoch=state.meta.epoch,
            number=state.meta.number,
            digest=digest,
            folder=folder.name,
            floor=state.floor,
            last_plan=state.last_plan,
        )
        await self._book.append(durable)
        self._under_way = None
        self._durable, self._durable_steps = durable, state.meta.steps
        self._recorded(durable)
        await self._retention.trim(durable)

    async def _begun(self) -> _UnderWay:
        state = self._state()
        aside = await asyncio.to_thread(self._store.aside, state.meta.epoch)
        try:
            written = await self._write(aside)
        except OSError:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
            raise
        committed = asyncio.create_task(asyncio.to_thread(self._commit, written, aside, state.meta), name="checkpoint")
        committed.add_done_callback(lambda _: self.when_done())
        return _UnderWay(state, aside, committed)

    def _commit(self, written: Callable[[], None], aside: Path, meta: CheckpointMeta) -> tuple[str, Path]:
        written()
        return self._store.commit(aside, meta)

    async def _needs_room(self, error: OSError) -> None:
        """Waits for it. Raises `error` where it is another one, or where the trainer drains first."""
        if not room.is_full(error) or not await self._wait_for_room(self._store.folder, _WHAT):
            raise error
