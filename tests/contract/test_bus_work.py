"""Work queues: every message is acknowledged, delivered again or dead with its reason; none is lost."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from pathlib import Path

import pytest
from bus_fixture import DEADLINE_S, Connect, OwnServer, publish_many, work_queue
from nats.aio.msg import Msg

from physarum.bus import log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import BusUnreachableError
from physarum.bus.publisher import Publisher
from physarum.bus.work import DeadLetter, Delivery, WorkQueue

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


async def fetch_all(queue: WorkQueue, count: int, *, wait_s: float = 5.0) -> list[Delivery]:
    got: list[Delivery] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < count:
            got += await queue.fetch(16, wait_s)
    return got


async def messages_left(bus: Bus) -> int:
    return (await log.state(bus, "tasks")).messages


async def dead_letters(bus: Bus) -> list[DeadLetter]:
    return [decode(entry.data, DeadLetter) for entry in await log.scan(bus, "dead")]


async def test_what_is_acknowledged_is_gone_and_what_is_not_stays(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 20)
    async with work_queue(bus, publisher) as queue:
        first = await queue.fetch(16, 5)
        assert [int(one.data) for one in first] == list(range(16)) and queue.held == 16
        for one in first:
            await one.ack()
        assert queue.held == 0 and await messages_left(bus) == 4


async def test_an_empty_queue_answers_when_something_comes(bus: Bus, publisher: Publisher) -> None:
    async with work_queue(bus, publisher) as queue:
        assert await queue.fetch(16, 0) == []
        waiting = asyncio.create_task(queue.fetch(16, DEADLINE_S))
        await publish_many(publisher, bus.run, "tasks", 1)
        async with asyncio.timeout(DEADLINE_S / 2):
            assert [one.data for one in await waiting] == [b"0"]


WORKER = """
import asyncio, sys
from bus_fixture import connect, work_queue
from physarum.bus.publisher import Publisher

async def main() -> None:
    bus = await connect(sys.argv[1], sys.argv[2])
    async with work_queue(bus, await Publisher(bus).start()) as queue:
        print(len(await queue.fetch(16, 10)), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_workers_messages_are_delivered_again_after_ack_wait(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 8)
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(WORKER), bus.endpoint.url, bus.run, stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert worker.stdout is not None
    try:
        assert await asyncio.wait_for(worker.stdout.readline(), DEADLINE_S) == b"8\n"
        async with work_queue(bus, publisher) as queue:
            assert await queue.fetch(16, 0) == []  # all are leased to the worker
            worker.kill()
            again = await fetch_all(queue, 8)
            assert sorted(int(one.data) for one in again) == list(range(8))
            assert {one.deliveries for one in again} == {2}
            for one in again:
                await one.ack()
        assert await messages_left(bus) == 0
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


async def test_work_longer_than_ack_wait_is_kept_by_heartbeats(
    bus: Bus, publisher: Publisher, connect_again: Connect
) -> None:
    await publish_many(publisher, bus.run, "tasks", 1)
    other = await connect_again("other")
    async with work_queue(bus, publisher) as queue, work_queue(other, await Publisher(other).start()) as idle:
        (long,) = await queue.fetch(1, 5)
        assert await idle.fetch(1, 2.5) == []  # two and a half times ack_wait
        await long.ack()
        assert await messages_left(bus) == 0


async def test_heartbeats_go_on_when_one_of_them_fails(
    bus: Bus, publisher: Publisher, connect_again: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_many(publisher, bus.run, "tasks", 2)
    other = await connect_again("other")
    async with work_queue(bus, publisher) as queue, work_queue(other, await Publisher(other).start()) as idle:
        broken, good = await fetch_all(queue, 2)
        broken.message.reply = ""  # nats-py refuses to extend it
        assert [one.sequence for one in await idle.fetch(2, 2.5)] == [broken.sequence]
        await good.ack()


async def test_a_returned_message_comes_back_and_is_buried_after_the_last_try(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 1)
    async with work_queue(bus, publisher, max_deliver=3) as queue:
        for attempt in (1, 2, 3):
            (one,) = await fetch_all(queue, 1)
            assert one.deliveries == attempt
            await one.retry(f"reward raised in try {attempt}", delay_s=0.05)
    (letter,) = await dead_letters(bus)
    assert (letter.reason, letter.deliveries, letter.worker) == ("reward raised in try 3", 3, "test-0")
    assert (letter.stream, letter.sequence, letter.key) == (names.stream(bus.run, "tasks"), 1, "tasks/0")
    assert (letter.body, letter.subject) == (b"0", names.subject(bus.run, "tasks", "p1", "0"))
    assert letter.headers["Ph-Run"] == bus.run
    assert await messages_left(bus) == 0


async def test_a_message_that_kills_its_workers_is_buried_by_the_next_one(
    bus: Bus, publisher: Publisher, connect_again: Connect
) -> None:
    """The poison prompt: nobody lives to say why."""
    await publish_many(publisher, bus.run, "tasks", 1)
    for attempt in (1, 2):
        victim = await connect_again(f"victim-{attempt}")
        queue = WorkQueue(victim, publisher, "tasks", "tasks_p1", worker="victim", ack_wait_s=60, max_deliver=2)
        await queue._puller.start()  # without `open`: nobody keeps the lease
        assert [one.deliveries for one in await queue.fetch(1, 5)] == [attempt]
    async with work_queue(bus, publisher, max_deliver=2) as queue:
        async with asyncio.timeout(DEADLINE_S):
            while await messages_left(bus):
                assert await queue.fetch(1, 1) == []
        assert queue.held == 0
    (letter,) = await dead_letters(bus)
    assert letter.reason == "2 deliveries ended without an answer (worker died or hung)"


async def test_another_runs_message_is_buried_and_counted(bus: Bus, publisher: Publisher) -> None:
    """Weights once reached another run's engine."""
    subject = names.subject(bus.run, "tasks", "p1", "x")
    await publisher.publish(subject, b"foreign", headers={"Ph-Run": "other-run"})
    await publisher.publish(subject, b"ours")
    async with work_queue(bus, publisher) as queue:
        assert [one.data for one in await fetch_all(queue, 1)] == [b"ours"]
    assert bus.foreign_messages == 1
    (letter,) = await dead_letters(bus)
    assert letter.reason == f"message of run 'other-run' in run '{bus.run}'" and letter.body == b"foreign"


async def test_burying_twice_writes_one_letter(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 1)
    async with work_queue(bus, publisher) as queue:
        (one,) = await queue.fetch(1, 5)
        await queue.bury(one, "first")
        await one.bury("again, after a crash before the acknowledgement")
    assert [letter.reason for letter in await dead_letters(bus)] == ["first"]


async def test_a_fetch_recovers_at_once_after_a_server_restart(own_server: OwnServer, own_bus: Bus) -> None:
    """An outstanding fetch of nats-py stalls until its timeout."""
    publisher = await Publisher(own_bus).start()
    async with work_queue(own_bus, publisher) as queue:
        waiting = asyncio.create_task(queue.fetch(16, 300))
        await own_bus.flush()
        await own_server.kill_and_restart()
        restarted = time.monotonic()
        await publish_many(publisher, own_bus.run, "tasks", 3)
        got = await asyncio.wait_for(waiting, DEADLINE_S)
        got += await fetch_all(queue, 3 - len(got)) if len(got) < 3 else []
        assert time.monotonic() - restarted < 10
        assert sorted(int(one.data) for one in got) == [0, 1, 2]


async def test_a_lost_acknowledgement_is_sent_again_and_nothing_comes_twice(
    own_server: OwnServer, own_bus: Bus
) -> None:
    """An orderly restart: the server remembers the lease, only the acknowledgement on its way is lost."""
    publisher = await Publisher(own_bus).start()
    await publish_many(publisher, own_bus.run, "tasks", 1)
    async with work_queue(own_bus, publisher) as queue:
        (one,) = await queue.fetch(1, 5)
        await own_server.server.stop()
        acknowledging = asyncio.create_task(one.ack())
        await own_server.start()
        await asyncio.wait_for(acknowledging, DEADLINE_S)
        assert await messages_left(own_bus) == 0
        assert await queue.fetch(1, 1.5) == []


async def test_a_server_that_forgot_the_lease_delivers_again_and_loses_nothing(
    own_server: OwnServer, own_bus: Bus
) -> None:
    """A killed server may have lost that it had delivered; it then ignores the acknowledgement of that delivery."""
    publisher = await Publisher(own_bus).start()
    await publish_many(publisher, own_bus.run, "tasks", 4)
    own_bus.timeout_s = 1.0
    async with work_queue(own_bus, publisher) as queue:
        seen = {int(one.data) for one in await fetch_all(queue, 4)}
        await own_server.kill_and_restart()
        for one in tuple(queue._held):
            await one.ack()
        async with asyncio.timeout(DEADLINE_S):
            while await messages_left(own_bus):
                for one in await queue.fetch(16, 0.5):
                    assert int(one.data) in seen
                    await one.ack()
    assert seen == {0, 1, 2, 3} and await dead_letters(own_bus) == []


async def test_an_acknowledgement_that_nobody_confirms_is_logged_and_the_message_comes_again(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await publish_many(publisher, bus.run, "tasks", 1)

    async def unanswered(*arguments: object, **options: object) -> Msg:
        raise BusUnreachableError("no answer")

    async with work_queue(bus, publisher) as queue:
        (one,) = await queue.fetch(1, 5)
        with monkeypatch.context() as patch:
            patch.setattr(bus, "request", unanswered)
            await one.ack()
        assert f"acknowledgement of {queue.stream} #1 not confirmed" in caplog.text and queue.held == 0
        (again,) = await fetch_all(queue, 1)
        assert again.deliveries == 2
        await again.ack()


async def test_a_second_acknowledgement_is_confirmed_too(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 1)
    async with work_queue(bus, publisher) as queue:
        (one,) = await queue.fetch(1, 5)
        await one.ack()
        async with asyncio.timeout(2):
            await one.ack()


async def test_a_cancelled_fetch_leaves_its_messages_to_the_next_one(bus: Bus, publisher: Publisher) -> None:
    """One fetch per task class is outstanding and all but one are cancelled: none may take a message with it."""
    async with work_queue(bus, publisher) as queue:
        waiting = asyncio.create_task(queue.fetch(1, 30))
        await publish_many(publisher, bus.run, "tasks", 1)
        async with asyncio.timeout(DEADLINE_S):
            while not queue._puller._messages:
                await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (one,) = await queue.fetch(1, 0)
        assert (one.data, one.deliveries) == (b"0", 1)


async def test_the_end_of_the_block_gives_back_what_was_not_ended(bus: Bus, publisher: Publisher) -> None:
    await publish_many(publisher, bus.run, "tasks", 2)
    async with work_queue(bus, publisher, ack_wait_s=60) as queue:
        assert len(await fetch_all(queue, 2)) == 2
    async with work_queue(bus, publisher) as queue:
        async with asyncio.timeout(0.9):  # sooner than ack_wait would
            assert {one.deliveries for one in await fetch_all(queue, 2)} == {2}


async def test_a_fetch_on_a_consumer_that_is_gone_does_not_spin(bus: Bus, publisher: Publisher) -> None:
    async with work_queue(bus, publisher) as queue:
        await bus.api(f"CONSUMER.DELETE.{queue.stream}.tasks_p1")
        started = time.monotonic()
        assert await queue.fetch(1, 5) == []
        assert time.monotonic() - started >= 0.2
