"""A new run from a checkpoint of another one and its log from there, with a changed configuration.

    parent   LEDGER 1 .. durable(N) | SAMPLES from the checkpoint's floor | TASKS EPISODES DEAD | position | checkpoint N
    child    the same records under the same sequences, under its own name; the checkpoint names the child's log

Invariant: sequences are kept, so plans, cursor and checkpoint of the parent hold in the child; epochs go on above the
parent's, with a takeover at N, so tokens made after N are as old as what they share with the child. The account of the
child closes: what the parent had issued is trained (in the copied ledger) or present (in the copied streams).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec

from physarum.actors import states
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.exporting import blob_of, execution_of
from physarum.actors.tools.new_run import context_of, inherit_start_model, made, write_lineage
from physarum.actors.tools.recorded import Recorded
from physarum.actors.tools.saved import durables
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.wire import publish_execution, publish_task, reference
from physarum.bus import ledger, log, names
from physarum.bus.codec import decode, encode
from physarum.bus.errors import BlobAlteredError, BlobMissingError, CodecError
from physarum.bus.lease import Counter
from physarum.bus.ledger import DurableRecord, Ledger, Numbered, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.records import Execution, Task
from physarum.bus.register import Register
from physarum.bus.work import DeadLetter
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """What was made. `samples`, `tasks`, `episodes`, `dead`: messages that were copied."""

    run: str
    folder: str
    parent: str
    step: int
    checkpoint: str
    epoch: int
    samples: int
    tasks: int
    episodes: int
    dead: int


async def checkpoint_at(parent: OpenRun, step: int) -> DurableRecord:
    """The newest checkpoint of the weights after `step` that is on disk. Raises NotInRunError naming those that are."""
    parent.refuse_several("fork")
    there = [one for one in await durables(parent) if (parent.folder.checkpoints / one.folder).is_dir()]
    found = [one for one in there if one.number == step]
    if not found:
        steps = ", ".join(str(one.number) for one in there) or "none"
        raise NotInRunError(
            f"run {parent.name} has no checkpoint of step {step} on disk; there are those of steps {steps}. Choose one of"
            " them, keep more (checkpoint.keep_last), or bring one back from a mirror (actorctl checkpoints restore)"
        )
    return found[-1]


async def fork(parent: OpenRun, durable: DurableRecord, config: RootConfig) -> Fork:
    """Makes the run that `config` names. Raises RunUnfitError, SamplesMissingError, or UnrecoverableError (altered)."""
    records = await ledger.read(parent.bus)
    folder, meta = await asyncio.to_thread(Checkpoints(parent.folder.checkpoints).load, durable.folder, durable.digest)
    floor = Cursor.of(meta.cursor).floor
    async with made(config, "fork") as child:
        position = await _position(parent)
        tasks = await _copy_tasks(parent, child, position)
        episodes = await _copy_executions(parent, child)
        samples = await _copy_samples(parent, child, floor)
        dead = await _copy_dead(parent, child)
        await _copy_added(parent, child)
        last = await _copy_checkpoint(child, folder, meta, records, durable)
        epoch = await _go_on_above(child, records)
        if position is not None:
            await _copy_position(child, parent.config.source.name, position, last)
        facts: dict[str, Any] = {"step": durable.number, "checkpoint": durable.folder, "floor": floor, "epoch": epoch}
        write_lineage(child, "fork", parent.name, facts)
        if parent.config.model == config.model:
            inherit_start_model(parent.folder, child.folder)
    return Fork(
        run=config.run.name,
        folder=str(config.run.folder),
        parent=parent.name,
        step=durable.number,
        checkpoint=durable.folder,
        epoch=epoch,
        samples=samples,
        tasks=tasks,
        episodes=episodes,
        dead=dead,
    )


async def _position(parent: OpenRun) -> states.SourcePosition | None:
    """Read first: what is issued while we copy is issued again by the child, under the same ordinals."""
    positions: Register[states.SourcePosition] = Register(parent.bus, parent.publisher, "run", states.SourcePosition)
    return (await positions.get(states.SOURCE_POSITION, parent.config.source.name)).value


async def _copy_position(child: OpenRun, source: str, position: states.SourcePosition, last: int) -> None:
    """The child's source goes on where the parent's is; refills that are asked for in the child's ledger are its own."""
    positions: Register[states.SourcePosition] = Register(child.bus, child.publisher, "run", states.SourcePosition)
    through = min(position.refilled_through, last)
    copied = msgspec.structs.replace(position, token=0, refilled_through=through)
    await positions.put(copied, states.SOURCE_POSITION, source)


async def _copy_tasks(parent: OpenRun, child: OpenRun, position: states.SourcePosition | None) -> int:
    context = context_of(child)
    issued = position.issued if position is not None else 0
    found = [decode(entry.data, Task) for entry in await log.scan(parent.bus, "tasks")]
    chosen = [task for task in found if task.task_class != "eval" and task.ordinal < issued]
    for task in chosen:
        await publish_task(context, msgspec.structs.replace(task, run=child.name))
    return len(chosen)


async def _copy_executions(parent: OpenRun, child: OpenRun) -> int:
    context = context_of(child)
    kinds = [names.subject(parent.name, "episodes", names.training(one)) for one in parent.config.reward.partitions]
    entries = [entry for kind in kinds for entry in await log.scan(parent.bus, "episodes", f"{kind}.>")]
    for entry in entries:
        execution = await asyncio.to_thread(execution_of, parent.folder, entry)
        await publish_execution(context, "episodes", _renamed(execution, child))
    return len(entries)


async def _copy_samples(parent: OpenRun, child: OpenRun, floor: int) -> int:
    """From the checkpoint's floor on, under the same sequences: the child's log begins where the parent's is needed."""
    recorded = await Recorded.open(parent.bus, parent.folder)
    recorded.require(floor, recorded.last)
    await child.bus.api(f"STREAM.PURGE.{names.stream(child.name, 'samples')}", {"seq": floor})
    context, count = context_of(child), 0
    async for entry in recorded.entries(floor, recorded.last):
        execution = await asyncio.to_thread(execution_of, parent.folder, entry)
        ack = await publish_execution(context, "samples", _renamed(execution, child))
        if ack.seq != entry.sequence:
            raise AssertionError(f"sample {entry.sequence} became {ack.seq}: the child's log does not begin at {floor}")
        count += 1
    return count


async def _copy_added(parent: OpenRun, child: OpenRun) -> None:
    """Under the same sequences, which are the names of their groups."""
    for entry in await log.scan(parent.bus, "added"):
        subject = names.subject(child.name, "added", entry.subject.rpartition(".")[2])
        await child.publisher.publish(subject, entry.data, expect_last_sequence=entry.sequence - 1)


async def _copy_dead(parent: OpenRun, child: OpenRun) -> int:
    """Letters are about tasks of this run now; what was decided about them in the parent is decided anew."""
    entries = await log.scan(parent.bus, "dead")
    for entry in entries:
        letter = decode(entry.data, DeadLetter)
        ours = letter.headers.get(names.RUN_HEADER) == parent.name
        headers = {**letter.headers, names.RUN_HEADER: child.name} if ours else letter.headers
        letter = msgspec.structs.replace(
            letter,
            stream=letter.stream.replace(f"{parent.name}_", f"{child.name}_", 1),
            subject=letter.subject.replace(f"ph.{parent.name}.", f"ph.{child.name}.", 1),
            headers=headers,
        )
        subject = names.subject(child.name, "dead", letter.stream, str(letter.sequence))
        if ours and (blob := await _copy_blob(parent, child, letter)) is not None:
            subject = names.by_reference(subject, blob)
        await child.publisher.publish(subject, encode(letter), message_id=f"dead/{letter.stream}/{letter.sequence}")
    return len(entries)


async def _copy_blob(parent: OpenRun, child: OpenRun, letter: DeadLetter) -> str | None:
    """The digest of a letter's body when it travels by reference; a body that is gone, or its reference, stays so."""
    try:
        ref = reference(letter.headers)
        if ref is not None:
            await asyncio.to_thread(lambda: child.folder.blobs.put(blob_of(parent.folder, ref)))
        return None if ref is None else ref.digest
    except (CodecError, BlobMissingError, BlobAlteredError) as error:
        _log.warning("dead letter of %s is copied without its body: %s", letter.key, error)
        return None


async def _copy_checkpoint(
    child: OpenRun, folder: Path, meta: CheckpointMeta, records: list[Numbered], durable: DurableRecord
) -> int:
    """The parent's ledger up to the checkpoint, and the checkpoint with the child's own log in its cursor.

    What was trained between the checkpoint's step and its record is not the child's: the record of the checkpoint stands in its
    places, so that every other record keeps its sequence. Returns the ledger's last sequence.
    """
    state = await log.state(child.bus, "samples")
    cursor = msgspec.structs.replace(meta.cursor, incarnation=state.created)
    digest = await asyncio.to_thread(_write_checkpoint, child, folder, msgspec.structs.replace(meta, cursor=cursor))
    last = max(item.sequence for item in records if item.record == durable)
    book = Ledger(child.bus, child.publisher, 0, 0)
    held = msgspec.structs.replace(durable, digest=digest)
    for item in records[:last]:
        await book.append(held if item.record == durable or _is_after(durable, item) else item.record)
    return last


def _is_after(durable: DurableRecord, item: Numbered) -> bool:
    """Whether it is a plan, or the step of one, that the checkpoint does not hold."""
    record = item.record
    if isinstance(record, StepRecord):
        return record.plan > durable.last_plan
    return isinstance(record, PlanRecord) and item.sequence > durable.last_plan


def _write_checkpoint(child: OpenRun, folder: Path, meta: CheckpointMeta) -> str:
    store = Checkpoints(child.folder.checkpoints)
    aside = store.aside(meta.epoch)
    for file in folder.iterdir():
        if file.suffix != ".msgpack" or file.stem not in ("meta", "digests"):
            shutil.copyfile(file, aside / file.name)
    return store.commit(aside, meta, folder.name)[0]


async def _go_on_above(child: OpenRun, records: list[Numbered]) -> int:
    """The child's trainer takes the epoch after the parent's last one; returns that last one."""
    epoch = max((item.record.new_epoch for item in records if isinstance(item.record, RollbackRecord)), default=0)
    counters: Register[Counter] = Register(child.bus, child.publisher, "run", Counter)
    await counters.put(Counter(epoch), "epoch", "trainer")
    return epoch


def _renamed(execution: Execution, child: OpenRun) -> Execution:
    return msgspec.structs.replace(execution, task=msgspec.structs.replace(execution.task, run=child.name))
