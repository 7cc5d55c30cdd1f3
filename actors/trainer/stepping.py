"""One step from plan to ledger, and what follows it: publication, checkpoint, trimming of the sample log.

Order, and why: the plan is recorded before it is trained (a crash replays it verbatim), the step after the weights
changed, `durable` after the checkpoint is on disk (saving.py), and samples are trimmed only below what every kept
checkpoint needs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from physarum.actors import policies, states
from physarum.actors.own_samples import OwnSamples
from physarum.actors.trainer import exports
from physarum.actors.trainer.age_alarm import AgeAlarm
from physarum.actors.trainer.batch import StepResult
from physarum.actors.trainer.bodies import Bodies
from physarum.actors.trainer.checkpoints import CheckpointMeta
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.errors import BadSequence, EmptyBatch, NonFiniteStep, SequenceTooLong
from physarum.actors.trainer.mirroring import Mirroring
from physarum.actors.trainer.mismatch_alarm import MismatchAlarm
from physarum.actors.trainer.offers import Offers
from physarum.actors.trainer.plan import Plan
from physarum.actors.trainer.planner import Planner
from physarum.actors.trainer.publication import Publication
from physarum.actors.trainer.recovery import Recovery
from physarum.actors.trainer.replay_alarm import ReplayAlarm
from physarum.actors.trainer.retention import Retention
from physarum.actors.trainer.saving import Saving, State
from physarum.actors.trainer.sequences import train_sequences
from physarum.actors.trainer.settings import plan_rules
from physarum.actors.trainer.step_metrics import age_metrics
from physarum.actors.trainer.step_record import shown, step_event, step_record
from physarum.actors.trainer.world import World
from physarum.actors.wire import read_header
from physarum.bus import log, room
from physarum.bus.lease import Lease
from physarum.bus.ledger import DurableRecord, GroupClosedRecord, Ledger, PlanRecord, RefillRecord, StepRecord
from physarum.bus.records import Execution
from physarum.bus.version import Fork, Version

if TYPE_CHECKING:
    from physarum.actors.trainer.actor import TrainerActor

T = TypeVar("T")


_REFUSALS: Final = (NonFiniteStep, EmptyBatch, SequenceTooLong, BadSequence)
"""The weights are as they were. A plan is replayed verbatim, so an error that it raises each time must end in a record."""


class Stepper:
    """Executes plans. `number` is the number of the weights as they are; `version` their label."""

    def __init__(
        self,
        actor: TrainerActor,
        world: World,
        book: Ledger,
        cursor: Cursor,
        publication: Publication,
        recovery: Recovery,
        lease: Lease,
        meta: CheckpointMeta | None,
    ) -> None:
        self._actor, self._context, self._config = actor, actor.context, actor.config
        self.world, self.publication = world, publication
        self.bodies = Bodies(self._context)
        self._book, self._cursor, self._lease = book, cursor, lease
        # In ordered mode a fork repeats the abandoned steps bit for bit: the number alone names the weights.
        self._forks = () if self._config.trainer.ordered else recovery.forks
        self.number = meta.number if meta is not None else 0
        self.trained_s = meta.trained_s if meta is not None else 0.0
        self._steps = meta.steps if meta is not None else 0
        self._copied_s = 0.0
        self._own = OwnSamples.of(self._config)
        self._retention = Retention(self._context, actor.checkpoints, recovery.durables)
        self.mirroring = Mirroring(actor, recovery)
        self.saving = Saving(
            actor.checkpoints,
            book,
            self._retention,
            write=self._write,
            state=self._state,
            recorded=self.mirroring.offer,
            wait_for_room=self._room,
            durable=recovery.durable,
            steps=self._steps,
        )
        mismatch = self._config.trainer.algorithm.mismatch
        self._metadata = self._config.trainer.algorithm.metadata
        self._alarm = MismatchAlarm(mismatch.window, mismatch.doubling_steps)
        self._replay_alarm = ReplayAlarm()
        self._age_alarm = AgeAlarm(self._config.age.bound)
        self._offers = Offers(actor, world, publication)

    @property
    def version(self) -> Version:
        return Version(self._config.model.name, self._lease.token, self.number)

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Every takeover so far, as ages count it."""
        return self._forks

    async def begin(self) -> None:
        """Announces the weights as they are, before anything is trained on."""
        await self._offers.begin()
        await self.publish()
        ready = states.TrainerReady(epoch=self._lease.token, number=self.number, at=time.time())
        key = policies.key(states.TRAINER_READY, self._context.policy)
        await self._context.run_register(states.TrainerReady).put(ready, *key)
        await self._context.emit("trainer_ready", {"epoch": ready.epoch, "number": ready.number})
        self._actor.become("ready")

    async def step(self, planner: Planner, waited_s: float, *, only_drops: bool = False) -> StepRecord:
        """Takes the next plan, records it and executes it."""
        self._lease.check()
        plan = planner.take(self._lease.token, self.number, self._forks, only_drops=only_drops, now=time.monotonic())
        self.bodies.claim(item.sequence for item in plan.record.executions)
        sequence = await self._book.append(plan.record)
        return await self._execute(sequence, plan, waited_s, planner.selection.metrics() | planner.filters.metrics())

    async def note(self, record: GroupClosedRecord | RefillRecord) -> None:
        """Records a decision about a group before it is acted on."""
        self._lease.check()
        await self._book.append(record)

    async def replay(self, sequence: int, record: PlanRecord) -> StepRecord:
        """Executes a plan that an earlier epoch recorded, verbatim: same executions, order, masks and advantages."""
        self._lease.check()
        headers = [self._own.header(read_header(entry.headers)) for entry in await self._entries(record)]
        plan = Plan.recorded(record, headers, self._forks, plan_rules(self._config))
        return await self._execute(sequence, plan, 0.0, {})

    async def _execute(self, sequence: int, plan: Plan, waited_s: float, selection: dict[str, float]) -> StepRecord:
        started_at, began_s = time.time(), time.perf_counter()
        measured = age_metrics(plan, self._offers.numbers_behind(self.number), selection)
        bodies = await self.bodies.get([item.sequence for item in plan.record.executions])
        measured |= {"bodies_s": time.perf_counter() - began_s} | self._stood_still()
        result, refused = await self._train(plan, bodies)
        measured |= {"compute_s": result.seconds if result is not None else 0.0}
        self.number += result is not None and result.changed
        record = step_record(self.version, sequence, plan, result, refused, waited_s, started_at)
        measured |= self._alarm.saw(record.metrics)
        self._replay_alarm.saw(record.metrics)
        record = msgspec.structs.replace(record, metrics=record.metrics | measured)
        await self._book.append(record)
        self._age_alarm.saw(record, self.publication.under_way)
        self._cursor.consume(sequence, plan.record)
        self._retention.stepped(self._cursor.floor)
        self._steps += 1
        # Not by the wall clock: one that is set while this trains must not end the run (stop.time_s).
        self.trained_s += time.perf_counter() - began_s + waited_s
        self._actor.progressed()
        await self._after(record)
        return record

    def _stood_still(self) -> dict[str, float]:
        """Seconds for which training stood still since the step before: for a version, and for a checkpoint."""
        copied_s, self._copied_s = self._copied_s, 0.0
        return {"snapshot_s": self._offers.stalled_s(), "state_copy_s": copied_s}

    async def _entries(self, record: PlanRecord) -> list[log.LogEntry]:
        return await log.get_many(self._context.bus, "samples", (item.sequence for item in record.executions))

    async def _train(self, plan: Plan, bodies: list[Execution]) -> tuple[StepResult | None, str]:
        record = plan.record
        try:
            # Megabytes of tokens are masked and joined: not on the loop that keeps the lease.
            sequences = await asyncio.to_thread(
                train_sequences, bodies, record.executions, record.at_number, plan.forks, self._metadata
            )
            if not sequences:
                return None, ""
            result = await self._actor.torch.run(
                lambda: self.world.step(sequences, number=self.number + 1),
                self._config.trainer.step_timeout_s,
                "a training step",
            )
        except _REFUSALS as error:
            return None, str(error)
        return result, ""

    async def _after(self, record: StepRecord) -> None:
        config = self._config.trainer
        if record.changed and self.number % config.publish_every == 0:
            await self.publish()
        await self._report(record)
        if config.export_every is not None and record.changed and self.number % config.export_every == 0:
            folder, keep = self._context.folder.exports, self._config.checkpoint.keep_exports
            await self.export(folder / str(self.version))
            await asyncio.to_thread(exports.retain, folder, self.version, keep)
        await self.saving.record_done()
        if self._steps - self.saving.steps >= config.checkpoint_every:
            self._lease.check()
            await self.saving.begin()

    async def publish(self, *, final: bool = False) -> None:
        """Offers the weights as they are (offers.py)."""
        await self._offers.make(self.version, final=final)

    async def publish_owed(self) -> None:
        """What could not be offered because the version before was still on its way, or because there was no room."""
        await self._offers.settle(self.version)

    async def export(self, target: Path) -> None:
        """Writes the weights as a Hugging Face folder: aside, then renamed over what is there; waits for a full disk."""
        await self._when_room(target.parent, "the model", lambda: self._export(target))

    async def _export(self, target: Path) -> None:
        aside = target.with_name(f".{target.name}-writing")
        await asyncio.to_thread(_make_room, aside)
        limit_s = self._config.trainer.step_timeout_s
        try:
            await self._actor.torch.run(lambda: self.world.save_hf(aside), limit_s, "writing the model")
        except OSError:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)  # others need the room that it takes
            raise
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
        await asyncio.to_thread(os.replace, aside, target)

    async def checkpoint(self) -> DurableRecord:
        """Makes the present state durable, records it, and trims what no kept checkpoint needs."""
        self._lease.check()
        return await self.saving.now()

    async def let_go(self) -> bool:
        """Frees room in the sample log: by a checkpoint now, else by giving up an older one. False when neither can."""
        if self.saving.under_way:
            await self.saving.settle()
            return True
        if self._steps != self.saving.steps:
            await self.checkpoint()
            return True
        return await self._retention.release()

    async def holds_log(self) -> bool:
        """Whether the sample log cannot be trimmed for this policy's sake, not for another's."""
        return await self._retention.holds_log()

    async def _when_room(self, folder: Path, what: str, write: Callable[[], Awaitable[T]]) -> T:
        """What `write` returns; while the disk of `folder` is full it waits, and what was there before stays."""
        while True:
            self._lease.check()
            try:
                return await write()
            except OSError as error:
                if not room.is_full(error) or not await self._room(folder, what):
                    raise

    async def _room(self, folder: Path, what: str) -> bool:
        """Waits, in a state of its own, for room on a disk; False when asked to drain."""
        before = self._actor.state
        self._actor.become("waiting for room on the disk")
        found = await room.until_room(folder, what, self._context.draining)
        if found:
            self._actor.become(before)
        return found

    async def _write(self, aside: Path) -> Callable[[], None]:
        self._lease.check()
        limit_s = self._config.trainer.step_timeout_s
        began = time.perf_counter()
        written = await self._actor.torch.run(
            lambda: self.world.begin_save(aside), limit_s, "copying the training state"
        )
        self._copied_s += time.perf_counter() - began
        return lambda: written(limit_s)

    def _state(self) -> State:
        meta = CheckpointMeta(
            epoch=self._lease.token,
            number=self.number,
            steps=self._steps,
            trained_s=self.trained_s,
            cursor=self._cursor.record(),
        )
        return State(meta, self._cursor.floor, self._cursor.last_plan)

    async def _report(self, record: StepRecord) -> None:
        self._actor.numbers |= shown(record)
        self._actor.facts = {"version": str(self.version), "debt": self.publication.debt}
        await self._context.emit("step", step_event(record, self._config.stop.steps, self.publication.published))


def _make_room(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
