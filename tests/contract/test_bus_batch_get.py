"""Batch direct gets against a real server: whole, exact, also when the server is killed in the middle."""

from __future__ import annotations

import asyncio

import pytest
from bus_fixture import DEADLINE_S, OwnServer

from physarum.bus import batch_get, log, names
from physarum.bus.batch_get import by_sequence, runs
from physarum.bus.connection import Bus
from physarum.bus.log import LogGapError
from physarum.bus.publisher import Publisher


async def fill(publisher: Publisher, run: str, count: int, size: int = 0) -> None:
    """Message n (from 1) has a body that names n."""
    subject = names.subject(run, "samples", "x")
    await asyncio.gather(
        *(publisher.publish(subject, b"%d " % n + bytes(size), message_id=f"m/{n}") for n in range(1, count + 1))
    )


def bodies(found: dict[int, object]) -> list[int]:
    return sorted(int(message.data.split()[0]) for message in found.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([], []),
        ([7], [range(7, 8)]),
        ([1, 2, 3], [range(1, 4)]),
        ([1, 5], [range(1, 6)]),  # three unwanted between them: one request
        ([1, 6], [range(1, 7)]),  # four: still one
        ([1, 7], [range(1, 2), range(7, 8)]),  # five: two
    ],
)
def test_sequences_become_few_runs(sequences: list[int], expected: list[range]) -> None:
    assert runs(sequences) == expected


def test_a_long_run_is_cut() -> None:
    assert [len(run) for run in runs(range(1, 1301))] == [512, 512, 276]


async def test_only_what_was_asked_for_is_returned(bus: Bus, publisher: Publisher) -> None:
    await fill(publisher, bus.run, 40)
    wanted = [1, 3, 4, 20, 40]
    found = await by_sequence(bus, names.stream(bus.run, "samples"), wanted)
    assert sorted(found) == wanted


async def test_what_the_stream_does_not_hold_is_absent(bus: Bus, publisher: Publisher) -> None:
    await fill(publisher, bus.run, 10)
    stream = names.stream(bus.run, "samples")
    await bus.api(f"STREAM.PURGE.{stream}", {"seq": 4})
    await bus.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 7})
    assert sorted(await by_sequence(bus, stream, [1, 5, 7, 8, 99])) == [5, 8]
    with pytest.raises(LogGapError, match="no message 7: it was trimmed"):
        await log.get_many(bus, "samples", [5, 7])


async def test_an_answer_cut_by_its_bound_of_bytes_is_asked_for_again(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_get, "_MOST_BYTES", 4096)
    await fill(publisher, bus.run, 20, size=1000)
    found = await by_sequence(bus, names.stream(bus.run, "samples"), range(1, 21))
    assert sorted(found) == list(range(1, 21))
    assert [int(found[n].data.split()[0]) for n in (1, 20)] == [1, 20]


async def test_a_server_that_is_killed_meanwhile_answers_after_its_restart(own_server: OwnServer, own_bus: Bus) -> None:
    await fill(await Publisher(own_bus).start(), own_bus.run, 200)
    own_server.kill()
    reading = asyncio.create_task(by_sequence(own_bus, names.stream(own_bus.run, "samples"), range(1, 201)))
    await own_server.start()
    found = await asyncio.wait_for(reading, DEADLINE_S)
    assert bodies(dict(found)) == list(range(1, 201))
