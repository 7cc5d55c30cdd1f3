"""Lists of last values are whole: more than the server answers at once, replaced or expiring while they are read."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from nats.aio.msg import Msg

from physarum.actors.tools.marks import DeadMark, read_marks
from physarum.bus import direct, names
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.direct import last_of, subject_of
from physarum.bus.errors import BusRefusedError, BusUnreachableError
from physarum.bus.presence import Heartbeat, Roster
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register

pytestmark = pytest.mark.timeout(60)

MANY = 1100
"""Above the 1,024 subjects of one answer."""


async def put_marks(bus: Bus, publisher: Publisher, count: int, *, at: float = 1.0) -> None:
    body = encode(DeadMark("retried", at))
    subjects = [names.subject(bus.run, "run", "dead", str(letter)) for letter in range(count)]
    await asyncio.gather(*(publisher.publish(subject, body) for subject in subjects))


@pytest.mark.parametrize("count", [0, 3, 1024, 1025, MANY])
async def test_every_mark_is_read_however_many_there_are(bus: Bus, publisher: Publisher, count: int) -> None:
    await put_marks(bus, publisher, count)
    marks = await read_marks(bus)
    assert sorted(marks) == list(range(count))
    assert {mark.action for mark in marks.values()} <= {"retried"}


async def test_a_register_of_more_values_than_one_answer_holds_is_read_whole(bus: Bus, publisher: Publisher) -> None:
    await put_marks(bus, publisher, MANY)
    assert len(await Register(bus, publisher, "run", DeadMark).entries("dead")) == MANY


async def test_a_newcomer_sees_more_actors_than_one_answer_holds(bus: Bus, publisher: Publisher) -> None:
    beats = [
        Heartbeat(
            role="engine", instance=f"engine-{number}", state="ready", pid=1, host="h", started_at=1.0, sequence=1
        )
        for number in range(MANY)
    ]
    subjects = [names.subject(bus.run, "presence", beat.role, beat.instance) for beat in beats]
    await asyncio.gather(
        *(publisher.publish(subject, encode(beat)) for subject, beat in zip(subjects, beats, strict=True))
    )
    async with Roster(bus, "engine").open() as roster:
        assert len(roster.members) == MANY


async def test_marks_that_are_replaced_while_they_are_read_are_never_missed(bus: Bus, publisher: Publisher) -> None:
    await put_marks(bus, publisher, MANY)

    async def replace() -> None:
        for round_ in itertools.count(2):
            await put_marks(bus, publisher, MANY, at=float(round_))

    replacing = asyncio.create_task(replace())
    try:
        for _ in range(10):
            assert len(await read_marks(bus)) == MANY
    finally:
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)


async def test_a_status_that_is_no_end_is_an_error(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(*_: object) -> tuple[list[Msg], dict[str, str]]:
        return [], {"Status": "408", "Description": "Bad Request"}

    monkeypatch.setattr(direct, "_listed", answers)
    with pytest.raises(BusRefusedError, match="status 408: Bad Request"):
        await last_of(bus, names.stream(bus.run, "run"), "x.*")


async def test_a_value_that_expires_while_the_list_is_read_makes_it_no_empty_one(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends such a list with 404 Message Not Found, after any part of it."""
    await put_marks(bus, publisher, 2)
    real, torn = direct._listed, 3

    async def answers(*query: object) -> tuple[list[Msg], dict[str, str]]:
        nonlocal torn
        torn -= 1
        return await real(*query) if torn < 0 else ([], {"Status": "404", "Description": "Message Not Found"})  # type: ignore[arg-type]

    monkeypatch.setattr(direct, "_listed", answers)
    stream, pattern = names.stream(bus.run, "run"), names.subject(bus.run, "run", "dead") + ".*"
    assert [subject_of(one)[-1] for one in await last_of(bus, stream, pattern)] == ["0", "1"]
    torn = 100
    with pytest.raises(BusUnreachableError, match="expired 8 times"):
        await last_of(bus, stream, pattern)
