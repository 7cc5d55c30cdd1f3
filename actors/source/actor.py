"""The source actor: one leader by lease, which issues a group of tasks for each row while there is room.

    rows --(epoch, index)--> group of tasks --receipts--> TASKS, then the position moves --> RUN
      ^                                                     | full: the publisher waits, nothing is issued
      +---- room (admission.py, pace.py) <---- LEDGER, DEAD, and what the engines serve

Invariant: the position moves past a row only after all its tasks are stored, and only under the lease's token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import ClassVar, Final

import msgspec

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.leadership import leading
from physarum.actors.policy_engines import policy_group, served_versions
from physarum.actors.runtime import Actor
from physarum.actors.source.admission import Sizes, admitted, has_room
from physarum.actors.source.choice import Choice
from physarum.actors.source.curriculum import Lessons
from physarum.actors.source.cursor import Picked
from physarum.actors.source.followers import Followers
from physarum.actors.source.pace import Pace
from physarum.actors.source.position import PositionKeeper
from physarum.actors.source.rows import open_rows
from physarum.actors.source.tasks import check_travels, group_tasks, refill_task
from physarum.actors.states import EvalScore, SourcePosition
from physarum.actors.waiting import anything, unless_draining, until
from physarum.actors.wire import publish_task
from physarum.bus.lease import Lease
from physarum.bus.ledger import RefillRecord
from physarum.bus.presence import Roster
from physarum.bus.records import Task
from physarum.bus.version import Version
from physarum.configs.data_files import RowError

_log = logging.getLogger(__name__)

_LEASE: Final = "source"
_DRAIN_GRACE_S: Final = 5.0
"""A group that is being stored when draining begins is finished within this, or issued again at the next start."""


class SourceActor(Actor):
    """Role source. A second instance stands by until the first one's lease is free."""

    role: ClassVar[str] = "source"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._source = self.config.source
        self._limit = admitted(self.config)
        self._engines: Roster | None = None
        chosen = self._source.curriculum
        self._lessons = None if chosen is None else Lessons(chosen, self._source.name, self.config.run.seed)
        self._followers = Followers(context, self._source.name, self._lessons)
        self._pace = self._make_pace()
        self._choice: Choice
        self._keeper: PositionKeeper

    async def run(self) -> None:
        self.become("standby")
        async with leading(self.context, _LEASE) as lease:
            if lease is None:
                return
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._followers.follow_ledger(), name="ledger"),
                    group.create_task(self._followers.follow_dead(), name="dead letters"),
                ]
                async with self._watching_engines():
                    await self._issue_all(lease)
                for helper in helpers:
                    helper.cancel()

    def _make_pace(self) -> Pace | None:
        age = self.config.age.of(self._source.name)
        if age.admission != "pace":
            return None
        return Pace(self._followers.clock, age.bound, self.config.trainer.groups_per_batch)

    @contextlib.asynccontextmanager
    async def _watching_engines(self) -> AsyncIterator[None]:
        """Where admission goes by what is served, and something serves: the source looks again at each change."""
        if self._limit is None or not self.config.engines:
            yield
            return
        self._engines = Roster(self.bus, "engine", on_change=self._followers.changed.set)
        async with self._engines.open():
            yield

    async def _issue_all(self, lease: Lease) -> None:
        self._keeper = PositionKeeper(self.context, self._source.name, lease)
        position = await self._keeper.claim()
        if self._pace is not None:
            self._pace.begin(position.issued)
        self._report()
        await self._open_rows()
        if self._exhausted(position):
            _log.info("all %s epochs were issued before: %d tasks", self.config.epochs, position.issued)
        else:
            await unless_draining(self.context, self._wait_for_start())
            await self._issue_rows()
        if not self.context.draining.is_set():
            self.become("finished")
            await unless_draining(self.context, self._refill_for_ever())

    def _exhausted(self, position: SourcePosition) -> bool:
        """Whether nothing is left; a source that was finished goes on when `source.epochs` was raised since."""
        return position.finished and self.config.epochs is not None and position.epoch >= self.config.epochs

    async def _open_rows(self) -> None:
        source, position = self._source, self._keeper.current
        rows = await asyncio.to_thread(
            open_rows,
            source.hook,
            source.data,
            source.args,
            source.columns,
            self.config.run.seed,
            shuffle=source.shuffle,
        )
        self._choice = Choice(self.config, rows, position, self._lessons)

    async def _wait_for_start(self) -> None:
        """The evaluation of the start version has the engines for itself."""
        if self.config.evaluation is None or not self.config.evaluation.at_start:
            return
        self.become("waiting")
        await until(self.context.run_register(EvalScore), anything, states.EVAL_START)

    async def _issue_rows(self) -> None:
        """Until the rows are exhausted or draining begins."""
        if not self.context.paused and not self.context.draining.is_set():
            self.become("ready")
        while not self.context.draining.is_set():
            await self.context.resumed.wait()
            if await unless_draining(self.context, self._wait_for_room()) is None:
                return
            if self._followers.refills:
                await self._refill()
                continue
            picked = await asyncio.to_thread(self._choice.pick, self._keeper.current)
            self.numbers["broken_rows"] = self._choice.cursor.broken
            if picked is None:
                await self._finish()
                return
            await self._issue(picked)

    async def _learn(self) -> None:
        """The curriculum's state moves with the ledger, and is stored before anything is issued under it."""
        if self._lessons is None:
            return
        moved = await asyncio.to_thread(self._lessons.advanced, self._keeper.current, self._followers.oldest_needed)
        if moved is not None:
            await self._keeper.move(moved)

    async def _wait_for_room(self) -> bool:
        """Until a group may be issued, or a refill is asked for (it takes the room of the task that died).

        The curriculum learns before each look: what it makes of the next group decides how much room that needs."""
        changed = self._followers.changed
        while True:
            changed.clear()
            await self._learn()
            oldest = self._followers.disposals.oldest_out
            sizes = await asyncio.to_thread(self._choice.sizes, self._keeper.current, oldest)
            if self._followers.refills or self._has_room(sizes):
                if self._lessons is not None and self._lessons.behind:
                    continue  # what made the room came while this looked: it is learnt from before it is used
                return True
            self._report()
            await changed.wait()

    def _has_room(self, sizes: Sizes) -> bool:
        done, served = self._followers.disposals, self._served()
        if self._pace is not None:
            return self._pace.has_room(self._issued, done.dead_count, done.oldest_out, self._pace.base(served), sizes)
        unserved = self._followers.clock.unserved(served or (), self.config.trainer.publish_every)
        return has_room(self._issued, done.count, sizes, self._limit, unserved)

    def _served(self) -> list[Version] | None:
        """By ready engines; None where there are none to look at."""
        return None if self._engines is None else served_versions(self._engines, policy_group(self.config))

    @property
    def _issued(self) -> int:
        return self._keeper.current.issued + self._keeper.current.refills

    async def _refill_for_ever(self) -> None:
        """After the last row: refills may still be asked for, and the curriculum learns on (more epochs may follow)."""
        changed = self._followers.changed
        while True:
            changed.clear()
            await self._learn()
            while self._followers.refills:
                await self._refill()
            await changed.wait()

    async def _refill(self) -> None:
        """Issues the refill that was asked for first, as its row's task with the next attempt, then moves past it."""
        sequence, record = self._followers.refills.popleft()
        current = self._keeper.current
        if sequence <= current.refilled_through:
            return
        task = await asyncio.to_thread(self._again, record, self._pin())
        await publish_task(self.context, task)
        await self._keeper.move(
            msgspec.structs.replace(current, refills=current.refills + 1, refilled_through=sequence)
        )
        _log.warning(
            "%s member %d is issued again as attempt %d (%s)",
            record.group,
            record.member,
            record.attempt,
            record.reason,
        )
        self._report()

    def _again(self, record: RefillRecord, pin: int | None) -> Task:
        """Reads files and calls hooks."""
        current, first = self._keeper.current, record.ordinal - record.member
        epoch, index = (int(part) for part in record.group.rsplit("/", 2)[1:])
        return refill_task(
            self._choice.again(current, first, epoch, index),
            record,
            run=self.bus.run,
            group_size=self._choice.group_size_at(current, first),
            sampling=self._choice.sampling(current, first),
            pin=pin,
        )

    def _pin(self) -> int | None:
        """In ordered mode, the number of the weights that must make the tokens of what is issued now."""
        return self._followers.numbers.current if self.config.trainer.ordered else None

    def _tasks(self, picked: Picked, pin: int | None) -> list[Task]:
        """Calls hooks."""
        current = self._keeper.current
        return group_tasks(
            picked.row,
            run=self.bus.run,
            source=self._source.name,
            place=f"{picked.epoch}/{picked.index}",
            first_ordinal=current.issued,
            group_size=self._choice.group_size_at(current, current.issued),
            sampling=self._choice.sampling(current, current.issued),
            pin=pin,
        )

    async def _issue(self, picked: Picked) -> None:
        tasks = await asyncio.to_thread(self._tasks, picked, self._pin())
        try:
            check_travels(tasks[0], self.bus.client.max_payload)
        except RowError as error:
            self._choice.cursor.skip(str(error))
            self.numbers["broken_rows"] = self._choice.cursor.broken
            return
        if await unless_draining(self.context, self._store(tasks), _DRAIN_GRACE_S) is None:
            _log.warning("draining: group %s is not stored as a whole and will be issued again", tasks[0].group)
            return
        self.progressed()
        self._report()

    async def _store(self, tasks: list[Task]) -> bool:
        base = (
            0 if self._pace is None else self._pace.base(self._served())
        )  # before: no engine serves less when they are taken
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(publish_task(self.context, task))
        current, cursor = self._keeper.current, self._choice.cursor
        await self._keeper.move(
            msgspec.structs.replace(
                current, epoch=cursor.epoch, index=cursor.index, issued=current.issued + len(tasks), finished=False
            )
        )
        if self._pace is not None:
            self._pace.note(self._keeper.current.issued, base)
        return True

    async def _finish(self) -> None:
        await self._keeper.move(
            msgspec.structs.replace(
                self._keeper.current,
                epoch=self._choice.cursor.epoch,
                index=self._choice.cursor.index,
                finished=True,
            )
        )
        self._report()
        _log.info("all %s epochs are issued: %d tasks", self.config.epochs, self._keeper.current.issued)

    def _report(self) -> None:
        position = self._keeper.current
        self.facts["position"] = {"epoch": position.epoch, "index": position.index, "finished": position.finished}
        self.numbers["issued"] = position.issued
        self.numbers["outstanding"] = self._issued - self._followers.disposals.count
