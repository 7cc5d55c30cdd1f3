"""The trainer actor: takes the lease, resumes from the last durable state, and turns plans into weight versions.

    SAMPLES headers --> planner --> plan --LEDGER--> bodies --> torch thread --> step --LEDGER-->+
        DEAD ------------^                                                                        |
                                    checkpoint --rename--> durable --LEDGER--> trim SAMPLES <-----+
                                    snapshot --> publication (beside training) --> head    <------+

Rank 0 is the only one on the bus. Torch runs in its own thread; nothing here waits for it without a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, ClassVar, Final

import xxhash

from physarum.actors import policies, states
from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.actors.leadership import leading
from physarum.actors.mirror.records import Named
from physarum.actors.mirror.restoring import restore_missing
from physarum.actors.runtime import Actor
from physarum.actors.trainer import errors as torch_errors
from physarum.actors.trainer.broadcasting import Broadcasting
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.filtering import Filters
from physarum.actors.trainer.intake import Intake
from physarum.actors.trainer.offers import broadcasts
from physarum.actors.trainer.planner import Planner
from physarum.actors.trainer.publication import Publication
from physarum.actors.trainer.readiness import Readiness
from physarum.actors.trainer.recovery import Recovery, recover
from physarum.actors.trainer.requests import Requests
from physarum.actors.trainer.settings import plan_rules, world_config
from physarum.actors.trainer.stepping import Stepper
from physarum.actors.trainer.stopping import StopRule, exhausted_reason
from physarum.actors.trainer.torch_thread import TorchThread
from physarum.actors.trainer.world import World
from physarum.bus import lease, ledger, log
from physarum.bus.control import Verb
from physarum.bus.errors import BusRefusedError, BusUnreachableError
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import Ledger, PlanRecord, RollbackRecord
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 600.0
_ASK_AGAIN_S: Final = 1.0

_CANNOT_BE_MENDED: Final = (
    torch_errors.UnknownMegatronField,
    torch_errors.UnsupportedModel,
    torch_errors.UnsupportedParallelism,
    torch_errors.StateMismatch,
)


class TrainerActor(Actor):
    """Role trainer, of one policy. One acts under the policy's lease; further ones stand by."""

    role: ClassVar[str] = "trainer"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.torch = TorchThread()
        self.checkpoints = Checkpoints(context.folder.checkpoints)
        self._requests: Requests | None = None

    def verbs(self) -> dict[str, Verb]:
        """`checkpoint`: make the present state durable now. `revive`: a dead letter is about to be retried."""

        async def checkpoint(body: dict[str, Any]) -> dict[str, Any]:
            return await self._asked().checkpoint()

        async def revive(body: dict[str, Any]) -> dict[str, Any]:
            return await self._asked().revive(int(body["letter"]))

        return {"checkpoint": checkpoint, "revive": revive}

    @property
    def _done(self) -> Register[states.TrainerDone]:
        return self.context.run_register(states.TrainerDone)

    def _key(self, name: str) -> tuple[str, ...]:
        return policies.key(name, self.context.policy)

    def _asked(self) -> Requests:
        if self._requests is None:
            raise RuntimeError(f"the trainer is {self.state}; expected it to be training: ask again when it is ready")
        return self._requests

    async def run(self) -> None:
        self.become("standby")
        async with leading(self.context, policies.named(policies.TRAINER, self.context.policy)) as held:
            if held is not None:
                await self._train(held)

    async def _train(self, held: lease.Lease) -> None:
        self.become("loading")
        if (await self._done.get(*self._key(states.TRAINER_DONE))).value is not None:
            await self._finished()
            return
        recovery = recover(await ledger.read(self.bus, key=self.context.ledger))
        model = self.context.folder.start_model.resolve()
        world = await self._world(model)
        cursor, meta = await self._restore(world, recovery)
        for item in recovery.withdrawn:
            assert isinstance(item.record, PlanRecord)
            cursor.consume(item.sequence, item.record)
        book = Ledger(self.bus, self.publisher, recovery.last_sequence, held.token, self.context.ledger)
        await book.append(
            RollbackRecord(
                old_epoch=recovery.last_epoch, new_epoch=held.token, fork=recovery.number, last_plan=recovery.last_plan
            )
        )
        recovery = recover(await ledger.read(self.bus, key=self.context.ledger))
        limit_s = self.config.checkpoint.broadcast_timeout_s
        broadcasting = Broadcasting(self.context, limit_s) if broadcasts(self.config) else None
        model_digest = xxhash.xxh3_128_hexdigest((model / "config.json").read_bytes())
        publication = Publication(self.context, model_digest, broadcasting, recovery.withdrawals)
        stepper = Stepper(self, world, book, cursor, publication, recovery, held, meta)
        await self._loop(stepper, recovery, cursor)

    async def _world(self, model: Path) -> World:
        settings = world_config(self.config, model)
        try:
            return await self.torch.run(lambda: World.start(settings), _START_TIMEOUT_S, "starting the trainer's ranks")
        except _CANNOT_BE_MENDED as error:
            raise UnrecoverableError(str(error)) from error

    async def _restore(self, world: World, recovery: Recovery) -> tuple[Cursor, CheckpointMeta | None]:
        state = await log.state(self.bus, "samples")
        durable = recovery.durable
        if durable is None:
            await self._begin_optimizer(world)
            return Cursor(state.created), None
        await restore_missing(self.config, self.checkpoints, Named.of(durable))
        folder, meta = await asyncio.to_thread(self.checkpoints.load, durable.folder, durable.digest)
        cursor = Cursor.of(meta.cursor)
        if cursor.incarnation != state.created or state.last < cursor.last_sequence:
            raise UnrecoverableError(
                f"the sample log was created {state.created} and ends at {state.last}; checkpoint {folder} was read from one"
                f" created {cursor.incarnation} up to {cursor.last_sequence}: the store lost its tail or is another run's."
                " Restore the store, or start a new run"
            )
        await self.torch.run(lambda: world.load(folder), _START_TIMEOUT_S, "loading the checkpoint")
        _log.info("resumed from %s at number %d, %d plans to replay", folder, meta.number, len(recovery.replay))
        return cursor, meta

    async def _begin_optimizer(self, world: World) -> None:
        start = self.config.trainer.optimizer_start
        if start is None:
            return
        try:
            steps = await self.torch.run(
                lambda: world.load_optimizer(start.folder, start.steps), _START_TIMEOUT_S, "loading the optimizer"
            )
        except torch_errors.StateMismatch as error:
            raise UnrecoverableError(f"trainer.optimizer_start: {error}") from error
        _log.info("the optimizer of %s has made %d steps", start.folder, steps)

    async def _loop(self, stepper: Stepper, recovery: Recovery, cursor: Cursor) -> None:
        replayed = IntervalSet(sequence for plan in recovery.replay for sequence in _sequences(plan.record))
        planner = Planner(
            plan_rules(self.config), _disposed(cursor, recovery), Filters(self.config.filters), recovery.withdrawals
        )
        for decided in recovery.decisions:
            planner.apply(decided)
        intake = Intake(self.context, planner, cursor, replayed)
        readiness = Readiness(self.context, stepper, planner, intake, recovery.refills, self._waiting)
        stepper.saving.when_done = lambda: readiness.ask(stepper.saving.record_done)
        stepper.publication.when_idle = lambda: readiness.ask(stepper.publish_owed)
        self._requests = Requests(self.bus, stepper, intake, readiness)
        async with readiness.space.watched(), asyncio.TaskGroup() as group:
            beside = [
                group.create_task(intake.read_samples(), name="read SAMPLES"),
                group.create_task(intake.read_dead(), name="read DEAD"),
                group.create_task(readiness.exhaustion.follow(), name="follow the source"),
                group.create_task(readiness.leader.follow(), name="follow the run's own policy"),
                group.create_task(stepper.publication.run(), name="publish versions"),
                group.create_task(stepper.mirroring.run(), name="mirror checkpoints"),
                group.create_task(stepper.bodies.run(planner, intake.came), name="fetch ahead"),
            ]
            await stepper.begin()
            reason = await self._steps(stepper, planner, readiness, recovery)
            self._requests = None
            if reason is not None:
                await self._finish(stepper, reason)
            else:
                await stepper.checkpoint()
                await stepper.mirroring.settled()
            for task in beside:
                task.cancel()
        if reason is not None:
            await self._finished()

    def _waiting(self, complete_groups: int) -> None:
        self.numbers["waiting_groups"] = complete_groups

    async def _steps(self, stepper: Stepper, planner: Planner, readiness: Readiness, recovery: Recovery) -> str | None:
        """Trains until a stop condition is met or nothing more can come (its name), or until draining (None)."""
        rule = StopRule(self.config.stop if readiness.leader.is_us else None, recovery.trained)
        await self._released()
        for item in recovery.replay:
            assert isinstance(item.record, PlanRecord)
            if self.context.draining.is_set():
                return None
            rule.saw(await stepper.replay(item.sequence, item.record), stepper.trained_s)
        while (reason := rule.met(stepper.number)) is None:
            come = await readiness.next()
            if come.what == "draining":
                return None
            if come.what == "exhausted" and not planner.has_rest:
                return exhausted_reason(self.config)
            if come.what == "let go":
                return f"the run's own policy is done: {come.why}"
            record = await stepper.step(planner, come.waited_s, only_drops=come.what == "drops")
            rule.saw(record, stepper.trained_s)
        return reason

    async def _released(self) -> None:
        """After versions were withdrawn engines get the good ones at once; training goes on when somebody says so."""
        holds = self.context.run_register(states.Hold)
        key = self._key(states.HOLD)
        async with holds.watch(*key) as changed:
            while not self.context.draining.is_set():
                changed.clear()
                try:
                    hold = (await holds.get(*key)).value
                except (BusUnreachableError, BusRefusedError) as error:
                    # No event says when a server that is back serves its streams again, so this read alone is repeated.
                    _log.warning("nobody says whether training is held, asking again: %s", error)
                    await self._changed(changed, _ASK_AGAIN_S)
                    continue
                if hold is None or hold.released:
                    break
                self.become("held")
                which = f" --policy {self.context.policy}" if self.context.policy else ""
                _log.warning("training is held: %s; `actorctl weights resume%s` lets it go on", hold.reason, which)
                await self._changed(changed, None)
        self.become("ready")

    async def _changed(self, changed: asyncio.Event, limit_s: float | None) -> None:
        """Until `changed` is set, the run drains, or the time is over."""
        waits = {asyncio.ensure_future(one.wait()) for one in (changed, self.context.draining)}
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _finish(self, stepper: Stepper, reason: str) -> None:
        """The last version is published, made durable and written in Hugging Face form; then the run is told."""
        self.become("finishing")
        await stepper.publish(final=True)
        await stepper.checkpoint()
        target = self.context.folder.model
        await stepper.export(target)
        await stepper.mirroring.settled()
        done = states.TrainerDone(
            reason=reason, version=str(stepper.version), steps=stepper.number, model=str(target), at=time.time()
        )
        await self._done.put(done, *self._key(states.TRAINER_DONE))
        _log.info("training ended (%s) at %s; the model is in %s", reason, stepper.version, target)

    async def _finished(self) -> None:
        self.become("finished")
        await self.context.draining.wait()


def _sequences(record: ledger.LedgerRecord) -> list[int]:
    assert isinstance(record, PlanRecord)
    return [place.sequence for place in record.places]


def _disposed(cursor: Cursor, recovery: Recovery) -> dict[str, IntervalSet]:
    """Ordinals gone by the checkpoint and by the plans that are still to be replayed (a copy: the cursor lags behind)."""
    disposed = {source: IntervalSet.of_intervals(done.intervals()) for source, done in cursor.disposed.items()}
    for item in recovery.replay:
        assert isinstance(item.record, PlanRecord)
        for gone in item.record.places:
            disposed.setdefault(gone.lineage, IntervalSet()).add(gone.ordinal)
    return disposed
