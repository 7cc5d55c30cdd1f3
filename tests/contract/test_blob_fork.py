"""A fork takes along the bodies of dead letters that travel by reference: their retry needs them in the child's store."""

from __future__ import annotations

from pathlib import Path

import pytest
from actor_fixture import make_context
from bus_fixture import connect, fresh_run, remove_streams, small_config
from fault_hooks import sample

from physarum.actors.context import Context
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.forking import _copy_dead
from physarum.actors.wire import publish_execution, read_execution
from physarum.bus import layout, log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Task
from physarum.bus.work import DeadLetter, WorkQueue

pytestmark = pytest.mark.timeout(30)


def opened(context: Context) -> OpenRun:
    return OpenRun(context.folder, context.config, context.bus, context.publisher, live=False)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_forks_dead_letter_has_its_body_or_is_copied_without(
    tmp_path: Path, bus: Bus, publisher: Publisher, lost: bool
) -> None:
    parent = make_context(tmp_path, bus, publisher, "tool", f"run.name={bus.run}", "bus.inline_limit_bytes=64")
    task = Task(id="main/0/7/0", run=bus.run, source="main", ordinal=7, group="g", group_size=1, member=0)
    made = Execution(id="e7", task=task, samples=[sample(7, padding=1000)], worker="w", started_at=0.0, finished_at=1.0)
    await publish_execution(parent, "episodes", made)
    queue = WorkQueue(bus, publisher, "episodes", "episodes_train", worker="t", ack_wait_s=5.0, max_deliver=5)
    async with queue.open():
        (delivery,) = await queue.fetch(1, 5.0)
        await delivery.bury("the hook raised")
    if lost:
        for path in parent.folder.path.glob("blobs/??/*"):
            path.unlink()
    other = await connect(bus.endpoint.url, fresh_run())
    try:
        await layout.create(other, small_config())
        child = make_context(tmp_path, other, await Publisher(other).start(), "tool", f"run.name={other.run}")
        assert await _copy_dead(opened(parent), opened(child)) == 1
        (entry,) = await log.scan(other, "dead")
        letter = decode(entry.data, DeadLetter)
        assert letter.reason == "the hook raised"
        assert (names.referenced(entry.subject) is None) is lost
        if not lost:
            assert (await read_execution(child, letter.headers, letter.body)).id == "e7"
            assert letter.subject.startswith(f"ph.{other.run}.episodes.train.")
    finally:
        await remove_streams(other, small_config())
        await other.close()
