"""What leaves the sample log is in a durable segment before, as far as `samples.keep` asks; on a real bus."""

from __future__ import annotations

from pathlib import Path

import pytest
from actor_fixture import make_context

from physarum.actors.context import Context
from physarum.actors.tools.archive import Archive, archive_below
from physarum.actors.tools.recorded import Recorded
from physarum.actors.trainer.checkpoints import Checkpoints
from physarum.actors.trainer.retention import Retention
from physarum.bus import log, names
from physarum.bus.connection import Bus
from physarum.bus.ledger import DurableRecord
from physarum.bus.publisher import Publisher


async def recorded(context: Context, count: int) -> None:
    for number in range(count):
        await context.publisher.publish(
            names.subject(context.bus.run, "samples", "train", f"t{number}"), b"%d" % number
        )


def context_of(tmp_path: Path, bus: Bus, publisher: Publisher, keep: str) -> Context:
    return make_context(tmp_path, bus, publisher, "trainer", f"samples.keep={keep}", "checkpoint.keep_last=1")


def durable(context: Context, number: int, floor: int) -> DurableRecord:
    (context.folder.checkpoints / f"1.{number}").mkdir(parents=True)
    return DurableRecord(epoch=1, number=number, digest="", folder=f"1.{number}", floor=floor, last_plan=0)


async def ranges(context: Context) -> list[tuple[int, int]]:
    return (await Recorded.open(context.bus, context.folder)).present()


@pytest.mark.parametrize(("keep", "left"), [("floor", [(7, 8)]), ("all", [(1, 8)]), ("1", [(5, 8)])])
async def test_trimmed_samples_are_kept_as_long_as_asked(
    tmp_path: Path, bus: Bus, publisher: Publisher, keep: str, left: list[tuple[int, int]]
) -> None:
    """Steps consume two samples each and are durable at once: floors 3, 5, 7."""
    context = context_of(tmp_path, bus, publisher, keep)
    await recorded(context, 8)
    retention = Retention(context, Checkpoints(context.folder.checkpoints), [])
    for number, floor in enumerate((3, 5, 7), start=1):
        retention.stepped(floor)
        await retention.trim(durable(context, number, floor))
    assert (await log.state(bus, "samples")).first == 7
    assert await ranges(context) == left
    assert [path.name for path in context.folder.checkpoints.iterdir()] == ["1.3"]


async def test_a_crash_between_archive_and_trim_archives_nothing_twice(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = context_of(tmp_path, bus, publisher, "all")
    await recorded(context, 6)
    archive = Archive(context.folder.archive)
    await archive_below(bus, archive, 4)  # the log was not trimmed
    await archive_below(bus, archive, 6)
    assert [(segment.first, segment.last) for segment in archive.segments()] == [(1, 3), (4, 5)]
    found = await Recorded.open(bus, context.folder)
    assert [(entry.sequence, entry.data) async for entry in found.entries(1, 6)] == [
        (n + 1, b"%d" % n) for n in range(6)
    ]


async def test_checkpoints_of_an_earlier_trainer_are_still_counted(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """A new trainer keeps what the ledger names: the log is not trimmed above what an older kept checkpoint needs."""
    context = make_context(tmp_path, bus, publisher, "trainer", "checkpoint.keep_last=2")
    await recorded(context, 8)
    earlier = durable(context, 1, 3)
    retention = Retention(context, Checkpoints(context.folder.checkpoints), [earlier])
    await retention.trim(durable(context, 2, 7))
    assert (await log.state(bus, "samples")).first == 3
    assert sorted(path.name for path in context.folder.checkpoints.iterdir()) == ["1.1", "1.2"]
