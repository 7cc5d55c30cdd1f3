"""Rows that are added at run time: accepted once, issued first and once whatever is killed when, and again when asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from actor_fixture import make_context, register_until, running
from bus_fixture import DEADLINE_S, connect, fresh_run, remove_streams, small_config

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.source.actor import SourceActor
from physarum.actors.states import SourcePosition
from physarum.actors.tools import adding
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.adding import Added
from physarum.actors.tools.errors import RunUnfitError
from physarum.actors.tools.forking import _copy_added
from physarum.bus import layout, log, names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.ledger import Ledger, RefillRecord
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.work import DeadLetter, WorkQueue

SMALL = ("age.admission=free", "source.epochs=1", "source.args.size=3")


@pytest_asyncio.fixture
async def queues(bus: Bus, publisher: Publisher) -> AsyncIterator[list[WorkQueue]]:
    """As workers ask: p0 before p1."""
    made = [
        WorkQueue(bus, publisher, "tasks", f"tasks_{name}", worker="test", ack_wait_s=5.0, max_deliver=1)
        for name in ("p0", "p1")
    ]
    async with made[0].open(), made[1].open():
        yield made


async def take(queues: list[WorkQueue], count: int) -> list[Task]:
    """Exactly `count` tasks, acknowledged."""
    found: list[Task] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            for queue in queues:
                for delivery in await queue.fetch(count - len(found), 0.2) if len(found) < count else []:
                    found.append(decode(delivery.data, Task))
                    await delivery.ack()
    return found


def run_of(context: Context) -> OpenRun:
    return OpenRun(context.folder, context.config, context.bus, context.publisher, live=True)


def rows(folder: Path, *prompts: str) -> Path:
    path = folder / "more.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "label": prompt[-1]}) + "\n" for prompt in prompts))
    return path


async def position(context: Context, **wanted: object) -> SourcePosition:
    register = context.run_register(SourcePosition)

    def there(value: SourcePosition) -> bool:
        return all(getattr(value, name) == expected for name, expected in wanted.items())

    return await register_until(register, there, states.SOURCE_POSITION, "main")


async def test_each_line_is_accepted_once_and_issued_before_the_next_row(
    tmp_path: Path, bus: Bus, publisher: Publisher, queues: list[WorkQueue]
) -> None:
    context = make_context(tmp_path, bus, publisher, "source", "source.chat.system_prompt=brief")
    async with running(SourceActor(context)):
        first = await take(queues, 8)
        file = rows(tmp_path, "x1", "x1", "x2")
        assert await adding.add(run_of(context), file, "p0") == Added(accepted=3)
        assert await adding.add(run_of(context), file, "p0") == Added(present=3)
        file.write_text(file.read_text() + '{"prompt": "x3"}\n{"no": 1}\nbroken\n')
        grown = await adding.add(run_of(context), file, "p1")
        assert (grown.accepted, grown.present, grown.broken) == (1, 3, 2)
        assert grown.named[0].startswith(f"{file}:5: no column `prompt`")
        assert [row.state for row in await adding.added(run_of(context))] == ["waiting"] * 4
        await position(context, issued=8)
        for task in first:
            await die(publisher, task)
        more = sorted(await take(queues, 8), key=lambda task: task.ordinal)
    assert [task.group for task in more] == [f"main/added/{sequence}" for sequence in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert [task.prompt for task in more] == ["x1"] * 4 + ["x2"] * 2 + ["x3"] * 2
    assert [task.task_class for task in more] == ["p0"] * 6 + ["p1"] * 2
    assert [task.ordinal for task in more] == list(range(8, 16))
    assert more[0].metadata["chat"]["system_prompt"] == "brief"
    assert [row.state for row in await adding.added(run_of(context))] == ["issued"] * 4


async def die(publisher: Publisher, task: Task) -> None:
    letter = DeadLetter(
        stream=names.stream(task.run, "tasks"), subject=names.subject(task.run, "tasks", "p1", task.id), sequence=1,
        key=task.id, reason="poison", deliveries=2, worker="w", at=0.0, headers={names.RUN_HEADER: task.run},
        body=encode(task), final=True,
    )  # fmt: skip
    await publisher.publish(names.subject(task.run, "dead", "x", str(task.ordinal)), encode(letter))


@pytest.mark.parametrize("adding_row", [1, 0])
async def test_a_source_that_was_killed_while_it_stored_tasks_issues_the_same_row_under_the_same_ordinals(
    tmp_path: Path, bus: Bus, publisher: Publisher, queues: list[WorkQueue], adding_row: int
) -> None:
    """Before the kill it was storing the added row (1), or the row at its position while one was added (0)."""
    context = make_context(tmp_path, bus, publisher, "source", *SMALL)
    assert (await adding.add(run_of(context), rows(tmp_path, "x1"), "p0")).accepted == 1
    killed = SourcePosition(epoch=0, index=1, issued=2, token=0, adding=adding_row)
    await context.run_register(SourcePosition).put(killed, states.SOURCE_POSITION, "main")
    async with running(SourceActor(context)):
        await position(context, finished=True, issued=8 - 2 + 2, added_through=1, adding=0)
        found = sorted(await take(queues, 6), key=lambda task: task.ordinal)
    added, own = ["main/added/1"] * 2, ["main/0/1"] * 2
    assert [task.group for task in found][:4] == (added + own if adding_row else own + added)
    assert [task.ordinal for task in found] == list(range(2, 8))
    assert (await log.state(bus, "tasks")).messages == 0


async def test_rows_are_issued_after_the_last_of_the_source_and_again_when_asked_for(
    tmp_path: Path, bus: Bus, publisher: Publisher, queues: list[WorkQueue]
) -> None:
    context = make_context(tmp_path, bus, publisher, "source", *SMALL)
    async with running(SourceActor(context)):
        await take(queues, 6)
        await position(context, finished=True)
        await adding.add(run_of(context), rows(tmp_path, "x1"), "p0")
        first = sorted(await take(queues, 2), key=lambda task: task.ordinal)
        assert [task.ordinal for task in first] == [6, 7]
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RefillRecord(source="main", ordinal=7, group="main/added/1", member=1, attempt=1))
        (again,) = await take(queues, 1)
    assert (again.id, again.prompt, again.ordinal) == ("main/added/1/1+1", "x1", 7)


async def test_a_run_that_is_over_takes_no_rows(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = make_context(tmp_path, bus, publisher, "source")
    context.folder.summary.parent.mkdir(parents=True, exist_ok=True)
    context.folder.summary.write_text("{}")
    with pytest.raises(RunUnfitError, match="is finished: nobody issues what is added"):
        await adding.add(run_of(context), rows(tmp_path, "x1"), "p0")


async def test_a_fork_has_the_rows_under_the_names_that_their_groups_have(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    parent = make_context(tmp_path, bus, publisher, "tool", f"run.name={bus.run}")
    await adding.add(run_of(parent), rows(tmp_path, "x1", "x2"), "p1")
    other = await connect(bus.endpoint.url, fresh_run())
    try:
        await layout.create(other, small_config())
        child = make_context(tmp_path, other, await Publisher(other).start(), "tool", f"run.name={other.run}")
        await _copy_added(run_of(parent), run_of(child))
        found = await adding.added(run_of(child))
        assert [(row.sequence, row.prompt, row.priority) for row in found] == [(1, "x1", "p1"), (2, "x2", "p1")]
        again = await adding.add(run_of(child), rows(tmp_path, "x1", "x2"), "p1")
        assert (again.accepted, again.present) == (0, 2)
    finally:
        await remove_streams(other, small_config())
        await other.close()
