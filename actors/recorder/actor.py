"""The recorder actor: publishes the start model once and counts what is recorded, until the run's stop condition.

    start_model --snapshot--> checkpoint service --> head policy@EPOCH.0 --> engines
    SAMPLES headers --count--> stop.samples, stop.steps (batches), stop.time_s, the source's end --> done

Invariant: it holds the trainer's lease and writes the ledger's takeover as a trainer does, so versions, account and every
tool read its run like any other; nothing is planned, so every sample stays in the log, in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import ClassVar, Final

import xxhash

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.leadership import leading
from physarum.actors.recorder.counting import Count
from physarum.actors.runtime import Actor
from physarum.actors.served_model import served_model
from physarum.actors.trainer.exhaustion import Exhaustion
from physarum.actors.trainer.publication import Offer, Publication
from physarum.actors.trainer.recovery import recover
from physarum.actors.waiting import anything, unless_draining, until
from physarum.actors.weights_area import weights_area
from physarum.bus import ledger
from physarum.bus.lease import Lease
from physarum.bus.ledger import Ledger, RollbackRecord
from physarum.bus.log import LogReader
from physarum.bus.version import Version
from physarum.weightsync.quantisation.reading import folder_tensors
from physarum.weightsync.snapshot import Snapshot

_log = logging.getLogger(__name__)

_FILLING: Final = "recorder-"
_PUBLISH_TIMEOUT_S: Final = 600.0


class RecorderActor(Actor):
    """Role recorder. A second instance stands by until the first one's lease is free."""

    role: ClassVar[str] = "recorder"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._count = Count(self.config)

    async def run(self) -> None:
        self.become("standby")
        async with leading(self.context, "trainer") as lease:
            if lease is not None:
                await self._record(lease)

    async def _record(self, lease: Lease) -> None:
        done = self.context.run_register(states.TrainerDone)
        if (await done.get(states.TRAINER_DONE)).value is None:
            version = await self._take_over(lease)
            reason = await self._until_done(version)
            if reason is None:
                return
            model = str(self.context.folder.start_model.resolve())
            record = states.TrainerDone(reason=reason, version=str(version), steps=0, model=model, at=time.time())
            await done.put(record, states.TRAINER_DONE)
            _log.info("recording ended (%s): %d executions", reason, self._count.executions)
        self.become("finished")
        await self.context.draining.wait()

    async def _take_over(self, lease: Lease) -> Version:
        found = recover(await ledger.read(self.bus))
        book = Ledger(self.bus, self.publisher, found.last_sequence, lease.token)
        await book.append(RollbackRecord(old_epoch=found.last_epoch, new_epoch=lease.token, fork=0))
        return Version(self.config.model.name, lease.token, 0)

    async def _until_done(self, version: Version) -> str | None:
        """Why recording ends; None when draining came first."""
        exhaustion = Exhaustion(self.context, self._count)
        model = self.context.folder.start_model.resolve()
        digest = await asyncio.to_thread(lambda: xxhash.xxh3_128_hexdigest((model / "config.json").read_bytes()))
        publication = Publication(self.context, digest)
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._count_samples(), name="count SAMPLES"),
                group.create_task(self._follow_dead(), name="follow DEAD"),
                group.create_task(exhaustion.follow(), name="follow the source"),
                group.create_task(publication.run(), name="publish the start model"),
            ]
            try:
                await self._publish(publication, version)
                waiting = self._wait_evaluated() if self.config.stop.evaluated else self._wait(exhaustion)
                return await unless_draining(self.context, waiting)
            finally:
                for task in beside:
                    task.cancel()

    async def _publish(self, publication: Publication, version: Version) -> None:
        if self.config.engines:
            snapshot = await asyncio.to_thread(self._snapshot, str(version))
            publication.offer(Offer(version, lambda: snapshot, {}))
            await publication.drained(_PUBLISH_TIMEOUT_S)
        ready = states.TrainerReady(epoch=version.epoch, number=0, at=time.time())
        await self.context.run_register(states.TrainerReady).put(ready, states.TRAINER_READY)
        await self.context.emit("trainer_ready", {"epoch": ready.epoch, "number": 0})
        self.facts = {"version": str(version)}
        self.become("ready")

    def _snapshot(self, label: str) -> Snapshot:
        model = served_model(self.context.folder, self.config).resolve()
        area = weights_area(self.context.folder, self.config)
        area.clear_filling(_FILLING)  # of a recorder that died: the lease is ours
        return Snapshot.take(folder_tensors(model), self.config.checkpoint.chunk_bytes, area, f"{_FILLING}{label}")

    async def _wait_evaluated(self) -> str:
        """Nothing is recorded: the evaluation of the start model is all there is to wait for."""
        score = await until(self.context.run_register(states.EvalScore), anything, states.EVAL_START)
        return f"{score.version} is evaluated"

    async def _wait(self, exhaustion: Exhaustion) -> str:
        """The stop condition that is met first."""
        started = time.monotonic()
        while True:
            self._count.changed.clear()
            self.numbers["executions"] = self._count.executions
            reason = self._count.met(time.monotonic() - started)
            if reason is not None:
                return reason
            if await exhaustion.reached(0):
                return f"the source is exhausted (epochs = {self.config.epochs})"
            limits = [
                limit for limit in (exhaustion.look_again_s, self._count.time_left_s(started)) if limit is not None
            ]
            change = asyncio.ensure_future(self._count.changed.wait())
            await asyncio.wait({change}, timeout=min(limits, default=None))
            change.cancel()

    async def _count_samples(self) -> None:
        reader = LogReader(self.bus, "samples", headers_only=True)
        async with aclosing(reader.batches(self.config.bus.fetch_timeout_s)) as batches:
            async for batch in batches:
                self._count.samples(batch, reader.next_sequence - 1)
                self.progressed()

    async def _follow_dead(self) -> None:
        reader = LogReader(self.bus, "dead")
        async with aclosing(reader.batches(self.config.bus.fetch_timeout_s)) as batches:
            async for batch in batches:
                self._count.dead(len(batch), reader.next_sequence - 1)
