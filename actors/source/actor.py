"""The source actor: one leader by lease, which issues a group of tasks for each row while there is room.

    rows --(epoch, index)--> group of tasks --receipts--> TASKS, then the position moves --> RUN
      ADDED --(sequence)------^  first
      ^                                                     | full: the publisher waits, nothing is issued
      +---- room for every policy (room.py) <---- LEDGER, DEAD, and what the engines serve

Invariant: the position moves past a row only after all its tasks are stored, and only under the lease's token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final

import msgspec

from physarum.actors import states
from physarum.actors.added_rows import AddedRow
from physarum.actors.context import Context
from physarum.actors.leadership import leading
from physarum.actors.runtime import Actor
from physarum.actors.source import places
from physarum.actors.source.additions import Additions
from physarum.actors.source.choice import Choice
from physarum.actors.source.curriculum import Lessons
from physarum.actors.source.cursor import Picked
from physarum.actors.source.followers import Followers
from physarum.actors.source.making import Making
from physarum.actors.source.opening import open_source
from physarum.actors.source.position import PositionKeeper
from physarum.actors.source.room import Room
from physarum.actors.source.tasks import check_sampling, check_travels
from physarum.actors.states import EvalScore, SourcePosition
from physarum.actors.waiting import anything, unless_draining, until
from physarum.actors.wire import publish_task
from physarum.bus.presence import Roster
from physarum.bus.records import Task
from physarum.configs.data_files import RowError
from physarum.configs.root import RootConfig

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
        self._engines: Roster | None = None
        chosen = self._source.curriculum
        self._lessons = None if chosen is None else Lessons(chosen, self._source.name, self.config.run.seed)
        self._followers = Followers(context, self._source.name, self._lessons)
        self._rooms = [Room(view, self._followers_of(view), lambda: self._engines) for view in self.config.views()]
        self._additions = Additions(self.bus, self._followers.changed)
        self._clean = False
        self._choice: Choice
        self._making: Making
        self._keeper: PositionKeeper

    async def run(self) -> None:
        self.become("standby")
        async with leading(self.context, _LEASE) as lease:
            if lease is None:
                return
            async with asyncio.TaskGroup() as group:
                helpers = []
                for room in self._rooms:
                    helpers.append(group.create_task(room.followers.follow_ledger(), name="ledger"))
                    helpers.append(group.create_task(room.followers.follow_dead(), name="dead letters"))
                self._keeper = PositionKeeper(self.context, self._source.name, lease)
                position = await self._keeper.claim()
                helpers.append(group.create_task(self._additions.follow(position.added_through), name="added rows"))
                async with self._watching_engines():
                    await self._issue_all(position)
                for helper in helpers:
                    helper.cancel()

    def _followers_of(self, view: RootConfig) -> Followers:
        """Refills are asked for, and curricula learn, by the run's own policy alone."""
        if not view.policy:
            return self._followers
        return Followers(self.context, self._source.name, policy=view.policy, changed=self._followers.changed)

    @contextlib.asynccontextmanager
    async def _watching_engines(self) -> AsyncIterator[None]:
        """Where admission goes by what is served, and something serves: the source looks again at each change."""
        if all(room.limit is None for room in self._rooms) or not self.config.engines:
            yield
            return
        self._engines = Roster(self.bus, "engine", on_change=self._followers.changed.set)
        async with self._engines.open():
            yield

    async def _issue_all(self, position: SourcePosition) -> None:
        self._clean = self._exhausted(position)  # then no row of its own can be half stored
        for room in self._rooms:
            room.begin(position.issued)
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
        rows = await asyncio.to_thread(open_source, source, self.config.run.seed)
        self._choice = Choice(self.config, rows, position, self._lessons)
        self._making = Making(self.config, self.bus.run, self._choice)

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
            if self.context.paused:
                continue
            if self._followers.refills:
                await self._refill()
                continue
            if (added := await self._added()) is not None:
                await self._issue_added(*added)
                continue
            picked = await asyncio.to_thread(self._choice.pick, self._keeper.current)
            self.numbers["broken_rows"] = self._choice.cursor.broken
            if picked is not None:
                await self._issue(picked)
                continue
            self._clean = True
            if await self._added() is None:
                await self._finish()
                return

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
            oldest = min(room.followers.disposals.oldest_out for room in self._rooms)
            sizes = await asyncio.to_thread(self._choice.sizes, self._keeper.current, oldest)
            if self._followers.refills or all(room.for_a_group(self._issued, sizes) for room in self._rooms):
                if self._lessons is not None and self._lessons.behind:
                    continue  # what made the room came while this looked: it is learnt from before it is used
                return True
            self._report()
            await changed.wait()

    @property
    def _issued(self) -> int:
        return self._keeper.current.issued + self._keeper.current.refills

    async def _refill_for_ever(self) -> None:
        """After the last row: refills may still be asked for, and the curriculum learns on (more epochs may follow)."""
        changed = self._followers.changed
        while True:
            changed.clear()
            await self._learn()
            await self.context.resumed.wait()
            while self._followers.refills:
                await self._refill()
            added = await self._added()
            if added is None:
                await changed.wait()
            elif await self._wait_for_room() and not (self._followers.refills or self.context.paused):
                await self._issue_added(*added)

    async def _refill(self) -> None:
        """Issues the refill that was asked for first, as its row's task with the next attempt, then moves past it."""
        sequence, record = self._followers.refills.popleft()
        current = self._keeper.current
        if sequence <= current.refilled_through:
            return
        epoch, index = places.read(record.group)
        added = (await self._additions.at(index)).row() if epoch == places.ADDED else None
        task = await asyncio.to_thread(self._making.again, self._keeper.current, record, added, self._pin())
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

    def _pin(self) -> int | None:
        """In ordered mode, the number of the weights that must make the tokens of what is issued now."""
        return self._followers.numbers.current if self.config.trainer.ordered else None

    async def _added(self) -> tuple[int, AddedRow] | None:
        """The added row to issue now. After a takeover some tasks may be stored under the next ordinals already: those of the
        row that was being added, or else of the row at the position. The same row then comes first again."""
        current = self._keeper.current
        if current.adding:
            return current.adding, await self._additions.at(current.adding)
        return self._additions.next(current.added_through) if self._clean else None

    async def _issue_added(self, sequence: int, added: AddedRow) -> None:
        """That it is this row which takes the next ordinals is stored before its tasks are."""
        if self._keeper.current.adding != sequence:
            await self._keeper.move(msgspec.structs.replace(self._keeper.current, adding=sequence))
        current = self._keeper.current
        tasks = await asyncio.to_thread(self._making.added, current, sequence, added, self._pin())
        moved = {"added_through": sequence, "adding": 0}
        if self._travels(tasks):
            await self._store(tasks, moved)
        else:
            await self._keeper.move(msgspec.structs.replace(self._keeper.current, **moved))
        self.numbers["added"] = self._keeper.current.added_through

    async def _issue(self, picked: Picked) -> None:
        tasks = await asyncio.to_thread(self._making.tasks, self._keeper.current, picked, self._pin())
        cursor = self._choice.cursor
        if self._travels(tasks):
            await self._store(tasks, {"epoch": cursor.epoch, "index": cursor.index, "finished": False})

    def _travels(self, tasks: list[Task]) -> bool:
        """Whether the bus takes such tasks, and the trainer what is drawn for them; else the row is counted as broken."""
        try:
            check_travels(tasks[0], self.bus.client.max_payload)
            check_sampling(tasks[0].metadata, tasks[0].group, self.config.trained_temperature)
        except RowError as error:
            self._choice.cursor.skip(str(error))
            self.numbers["broken_rows"] = self._choice.cursor.broken
            return False
        return True

    async def _store(self, tasks: list[Task], moved: dict[str, Any]) -> None:
        """Stores the tasks, then moves the position past them."""
        if await unless_draining(self.context, self._stored(tasks, moved), _DRAIN_GRACE_S) is None:
            _log.warning("draining: group %s is not stored as a whole and will be issued again", tasks[0].group)
            return
        self._clean = True
        self.progressed()
        self._report()

    async def _stored(self, tasks: list[Task], moved: dict[str, Any]) -> bool:
        noting = [room.noting() for room in self._rooms]
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(publish_task(self.context, task))
        current = self._keeper.current
        await self._keeper.move(msgspec.structs.replace(current, issued=current.issued + len(tasks), **moved))
        for note in noting:
            note(self._keeper.current.issued)
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
        done = min(room.followers.disposals.count for room in self._rooms)
        self.numbers["outstanding"] = self._issued - done
