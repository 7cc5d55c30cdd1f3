"""The checkpoint actor sweeps blobs over a real bus: what a stream or the archive refers to stays, the rest goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from actor_fixture import ActorProcess, actor_process, make_context
from bus_fixture import DEADLINE_S, Connect, OwnServer
from fault_hooks import sample

from physarum.actors.checkpoint.roots import Roots, RootsIncompleteError
from physarum.actors.context import Context
from physarum.actors.tools.archive import Archive, archive_below
from physarum.actors.tools.errors import ArchiveAlteredError
from physarum.actors.wire import ExecutionStream, publish_execution, read_execution
from physarum.bus import log, names
from physarum.bus.blob_remote import RemoteStore
from physarum.bus.blobs import BlobRef
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.ledger import DurableRecord, Ledger
from physarum.bus.names import BLOB_HEADER, StreamKey
from physarum.bus.presence import Roster
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Task
from physarum.bus.work import WorkQueue

pytestmark = pytest.mark.timeout(60)

SETTINGS = ("bus.inline_limit_bytes=64", "blobs.grace_s=0.0", "blobs.sweep_every_s=0.01", "samples.keep=all")


def make(place: Path, bus: Bus, publisher: Publisher, role: str, *overrides: str) -> Context:
    made = make_context(place, bus, publisher, role, *SETTINGS, *overrides)
    made.folder.blobs.identity()
    return made


def execution(run: str, ordinal: int) -> Execution:
    task = Task(id=f"main/0/{ordinal}/0", run=run, source="main", ordinal=ordinal, group="g", group_size=1, member=0)
    made = [sample(ordinal, padding=1000)]
    return Execution(id=f"e{ordinal}", task=task, samples=made, worker="w", started_at=0.0, finished_at=1.0)


def ref(run: str, ordinal: int) -> BlobRef:
    return BlobRef.of(encode(execution(run, ordinal)))


async def publish(context: Context, key: ExecutionStream, *ordinals: int) -> None:
    for ordinal in ordinals:
        await publish_execution(context, key, execution(context.bus.run, ordinal))


def left(context: Context) -> set[str]:
    return {path.name for path in context.folder.path.glob("blobs/??/*")}


class Trainer:
    """Writes the durable records that sweeps follow."""

    def __init__(self, context: Context) -> None:
        self._ledger = Ledger(context.bus, context.publisher, 0, 1)
        self._number = 0

    async def checkpoint(self) -> None:
        self._number += 1
        await self._ledger.append(
            DurableRecord(epoch=1, number=self._number, digest="", folder="", floor=1, last_plan=0)
        )


async def purge(bus: Bus, key: StreamKey, below: int) -> None:
    await bus.api(f"STREAM.PURGE.{names.stream(bus.run, key)}", {"seq": below})


@asynccontextmanager
async def serving(context: Context) -> AsyncIterator[ActorProcess]:
    """A checkpoint actor as a process, once its store is announced."""
    with actor_process(context) as process:
        async with Roster(context.bus, "checkpoint").open() as roster, asyncio.timeout(DEADLINE_S):
            while not any("store" in beat.facts for beat in roster.members):
                await roster.wait_change(1.0)
        yield process


async def test_what_is_referred_to_from_anywhere_stays_and_the_rest_goes(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = make(tmp_path, bus, publisher, "checkpoint")
    trainer = Trainer(context)
    await publish(context, "samples", 1, 2, 3)
    await publish(context, "episodes", 4, 5)
    await publish(context, "evals", 6)
    orphan = context.folder.blobs.put(b"published by nobody")
    await archive_below(bus, Archive(context.folder.archive), 2)
    await purge(bus, "samples", 2)
    async with _episodes(bus, publisher) as queue:
        (delivery, leased) = await queue.fetch(2, 5.0)
        await delivery.bury("unreadable")
        async with serving(context):
            assert orphan.digest in left(context)
            await eventually_swept(context, trainer, {ref(bus.run, ordinal).digest for ordinal in range(1, 7)})
            assert leased.data == b"" and (await read_execution(context, leased.headers, b"")).id == "e5"
            await leased.ack()
            await purge(bus, "evals", 2)
            await eventually_swept(context, trainer, {ref(bus.run, ordinal).digest for ordinal in range(1, 5)})
            archived, dead = Archive(context.folder.archive), await log.get(bus, "dead", 1)
            assert dead.subject.endswith(f".blob.{ref(bus.run, 4).digest}")
            assert len(archived.segments()) == 1


async def eventually_swept(context: Context, trainer: Trainer, expected: set[str]) -> None:
    """Two sweeps must find a blob without a reference, each after a checkpoint."""
    async with asyncio.timeout(DEADLINE_S):
        while left(context) != expected:
            assert left(context) > expected
            await trainer.checkpoint()
            await asyncio.sleep(0.05)


async def until_some_went(context: Context, trainer: Trainer, garbage: set[str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while garbage <= left(context):
            await trainer.checkpoint()
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _episodes(bus: Bus, publisher: Publisher) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(bus, publisher, "episodes", "episodes_train", worker="test", ack_wait_s=5.0, max_deliver=5)
    async with queue.open():
        yield queue


async def test_a_leader_that_is_killed_is_replaced_and_no_reference_is_lost(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Killed again and again while it sweeps."""
    context = make(tmp_path, bus, publisher, "checkpoint")
    trainer = Trainer(context)
    kept = {ref(bus.run, ordinal).digest for ordinal in range(5)}
    await publish(context, "samples", *range(5))
    for turn in range(3):
        garbage = {context.folder.blobs.put(b"%d %d" % (turn, number)).digest for number in range(50)}
        async with serving(context) as process:
            if turn < 2:
                await until_some_went(context, trainer, garbage)
                process.kill()
            else:
                await eventually_swept(context, trainer, kept)
        assert kept <= left(context)
    for ordinal in range(5):
        assert (await read_execution(context, {BLOB_HEADER: encode_ref(bus, ordinal)}, b"")).id == f"e{ordinal}"


async def test_the_service_outlives_its_bus_and_sweeps_on(tmp_path: Path, own_server: OwnServer, own_bus: Bus) -> None:
    context = make(tmp_path, own_bus, await Publisher(own_bus).start(), "checkpoint")
    trainer = Trainer(context)
    async with serving(context) as process:
        async with Roster(own_bus, "checkpoint").open() as roster:
            (beat,) = roster.members
        store = RemoteStore(beat.facts["store"], beat.facts["url"], None, timeout_s=5.0)
        own_server.kill()
        orphan = BlobRef.of(b"stored while the bus is away")
        await store.put(orphan, b"stored while the bus is away")
        await own_server.start()
        assert orphan.digest in left(context)
        await eventually_swept(context, trainer, set())
        assert process.process.poll() is None


def encode_ref(bus: Bus, ordinal: int) -> str:
    found = ref(bus.run, ordinal)
    return f'{{"digest":"{found.digest}","size":{found.size}}}'


async def test_an_archive_that_is_elsewhere_or_altered_stops_the_mark(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = make(tmp_path, bus, publisher, "checkpoint")
    await publish(context, "samples", 1, 2)
    await archive_below(bus, Archive(context.folder.archive), 2)
    await purge(bus, "samples", 2)
    assert await Roots(context).mark() == {ref(bus.run, 1).digest, ref(bus.run, 2).digest}
    (segment,) = Archive(context.folder.archive).segments()
    whole = segment.path.read_bytes()
    segment.path.write_bytes(whole[:-1] + b"R")
    with pytest.raises(ArchiveAlteredError, match="truncated or altered"):
        await Roots(context).mark()
    segment.path.unlink()
    with pytest.raises(RootsIncompleteError, match=r"SAMPLES begins at 2 and .* ends at 0; .*machine of the trainer"):
        await Roots(context).mark()


async def test_messages_that_need_no_blob_cost_the_mark_nothing(
    tmp_path: Path, bus: Bus, publisher: Publisher, connect_again: Connect
) -> None:
    """The mark reads only messages that refer to a blob, and those have no body."""
    context = make(tmp_path, bus, publisher, "checkpoint")
    for number in range(200):
        subject = names.subject(bus.run, "samples", "train", str(number))
        await publisher.publish(subject, bytes(10_000), message_id=f"samples/{number}")
    await publish(context, "samples", 1)
    other = await connect_again("mark")
    context.bus = other
    before = other.client.stats["in_bytes"]
    assert await Roots(context).mark() == {ref(bus.run, 1).digest}
    assert other.client.stats["in_bytes"] - before < 20_000
