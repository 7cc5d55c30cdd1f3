"""Logs are read in order, without gap or repetition, from any point, also across the server's death."""

from __future__ import annotations

import asyncio

import pytest
from bus_fixture import DEADLINE_S, OwnServer, publish_many

from physarum.bus import log, names
from physarum.bus.connection import Bus
from physarum.bus.log import LogEntry, LogGapError, LogReader
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


async def read(reader: LogReader, count: int, *, wait_s: float = 2.0) -> list[LogEntry]:
    got: list[LogEntry] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in reader.batches(wait_s):
            got += batch
            if len(got) >= count:
                return got
    raise AssertionError("the loop above only ends by return")


def numbers(entries: list[LogEntry]) -> list[int]:
    return [int(entry.data) for entry in entries]


async def test_a_log_is_read_in_order_and_from_where_the_reader_stands(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "samples", 600)
    reader = LogReader(bus, "samples")
    got = await read(reader, 600)
    assert numbers(got) == list(range(600)) and [entry.sequence for entry in got] == list(range(1, 601))
    assert reader.next_sequence == 601
    assert numbers(await read(LogReader(bus, "samples", 591), 10)) == list(range(590, 600))


async def test_a_reader_at_the_end_hears_silence_and_then_what_comes(bus: Bus, publisher: Publisher) -> None:
    batches = LogReader(bus, "samples").batches(0.1)
    assert await anext(batches) == []
    await publish_many(publisher, bus.run, "samples", 1)
    async with asyncio.timeout(DEADLINE_S):
        while not (batch := await anext(batches)):
            pass
    assert numbers(batch) == [0]
    await batches.aclose()  # type: ignore[attr-defined]


async def test_a_lost_message_is_an_error_with_both_sequences(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "samples", 5)
    await bus.api(f"STREAM.MSG.DELETE.{names.stream(bus.run, 'samples')}", {"seq": 3})
    with pytest.raises(LogGapError, match="expected sequence 3, found 4; messages between were trimmed or lost"):
        await read(LogReader(bus, "samples"), 5)
    with pytest.raises(LogGapError, match="has no message 3"):
        await log.get(bus, "samples", 3)


async def test_a_cursor_below_the_trimmed_part_is_an_error(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "samples", 5)
    await bus.api(f"STREAM.PURGE.{names.stream(bus.run, 'samples')}", {"seq": 4})
    with pytest.raises(LogGapError, match="expected sequence 2, found 4"):
        await read(LogReader(bus, "samples", 2), 1)
    assert numbers(await read(LogReader(bus, "samples"), 2)) == [3, 4]  # from the beginning: what there is


async def test_a_reader_goes_on_across_a_kill_without_loss_or_repetition(own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    await publish_many(publisher, own_bus.run, "samples", 10)
    reader, got, started = LogReader(own_bus, "samples"), [], asyncio.Event()

    async def follow() -> None:
        async for batch in reader.batches(30):
            got.extend(batch)
            if got:
                started.set()
            if len(got) >= 30:
                return

    following = asyncio.create_task(follow())
    await asyncio.wait_for(started.wait(), DEADLINE_S)
    own_server.kill()
    publishing = asyncio.create_task(publish_rest(publisher, own_bus))
    await own_server.start()
    await asyncio.wait_for(publishing, DEADLINE_S)
    await asyncio.wait_for(following, DEADLINE_S)
    assert numbers(got) == list(range(30))


async def publish_rest(publisher: Publisher, bus: Bus) -> None:
    for number in range(10, 30):
        await publisher.publish(names.subject(bus.run, "samples", "p1"), b"%d" % number, message_id=f"late/{number}")


async def test_an_unreadable_end_of_a_log_is_an_error_not_a_silence(own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    await publish_many(publisher, own_bus.run, "samples", 5)
    await own_server.server.stop()
    own_server.server.seal_path.unlink()  # as a crash leaves it, and as the seal's own remedy says
    (block,) = own_server.server.seal_path.parent.glob("store/jetstream/*/streams/*_SAMPLES/msgs/1.blk")
    stored = bytearray(block.read_bytes())
    stored[-9] ^= 255  # the last message's body or checksum
    block.write_bytes(stored)
    await own_server.start()
    with pytest.raises(LogGapError, match="messages up to 5 and gives none from 5 on"):
        await read(LogReader(own_bus, "samples"), 5, wait_s=0.2)


async def test_a_reader_whose_consumer_expired_makes_another(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "samples", 3)
    reader = LogReader(bus, "samples")
    batches = reader.batches(0.2)
    assert numbers(await anext(batches)) == [0, 1, 2]
    await bus.api(f"CONSUMER.DELETE.{names.stream(bus.run, 'samples')}.{reader._name}")
    await publisher.publish(names.subject(bus.run, "samples", "x"), b"3")
    async with asyncio.timeout(DEADLINE_S):
        while not (batch := await anext(batches)):
            pass
    assert numbers(batch) == [3]
    await batches.aclose()  # type: ignore[attr-defined]


async def test_headers_only_brings_headers_and_no_body(bus: Bus, publisher: Publisher) -> None:
    await publisher.publish(names.subject(bus.run, "samples", "x"), b"body", headers={"Ph-Header": "{}"})
    (entry,) = await read(LogReader(bus, "samples", headers_only=True), 1)
    assert entry.data == b"" and entry.headers["Ph-Header"] == "{}"


async def test_another_runs_message_is_passed_over_and_counted(bus: Bus, publisher: Publisher) -> None:
    subject = names.subject(bus.run, "samples", "x")
    await publisher.publish(subject, b"0", headers={"Ph-Run": "other"})
    await publisher.publish(subject, b"1")
    assert numbers(await read(LogReader(bus, "samples"), 1)) == [1]
    assert bus.foreign_messages == 1


async def test_many_are_returned_in_the_order_asked_for(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "samples", 50)
    wanted = [50, 1, 7, 7, 33]
    got = await log.get_many(bus, "samples", wanted)
    assert [entry.sequence for entry in got] == wanted and numbers(got) == [49, 0, 6, 6, 32]


async def test_a_scan_of_a_work_queue_consumes_nothing(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 4)
    await bus.api(f"STREAM.MSG.DELETE.{names.stream(bus.run, 'tasks')}", {"seq": 2})
    for _ in range(2):
        assert numbers(await log.scan(bus, "tasks")) == [0, 2, 3]
    assert (await log.state(bus, "tasks")).messages == 3


async def test_a_scan_of_an_empty_stream_is_empty(bus: Bus) -> None:
    assert await log.scan(bus, "dead") == []


async def test_a_stream_made_again_has_another_incarnation(bus: Bus, publisher: Publisher) -> None:
    from bus_fixture import small_config

    from physarum.bus import layout

    before = await log.state(bus, "samples")
    await bus.api(f"STREAM.DELETE.{names.stream(bus.run, 'samples')}")
    await layout.create(bus, small_config())
    assert (await log.state(bus, "samples")).created != before.created
