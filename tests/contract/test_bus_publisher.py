"""Publishing always ends: stored once, refused by name, or out of time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bus_fixture import DEADLINE_S, Connect, OwnServer, publish_many
from nats.aio.msg import Msg

from physarum.bus import log, names
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import (
    BusRefusedError,
    BusUnreachableError,
    PublishTimeoutError,
    StreamFullError,
    WrongSequenceError,
)
from physarum.bus.publisher import Publisher
from physarum.bus.server import EmbeddedServer

pytestmark = pytest.mark.timeout(60)


class WithRules(EmbeddedServer):
    """A server with an account's permissions added to its configuration."""

    def __init__(self, folder: Path, rules: str) -> None:
        super().__init__(folder)
        self._rules = rules

    def _config(self, ports: Path) -> str:
        return super()._config(ports) + self._rules


def stall(monkeypatch: pytest.MonkeyPatch, publisher: Publisher) -> None:
    """Receipts are received and lost."""

    async def lost(message: Msg) -> None:
        return

    monkeypatch.setattr(publisher, "_on_reply", lost)


async def filled(publisher: Publisher, bus: Bus) -> tuple[str, bytes]:
    """Fills EVALS; returns the subject and body of the first message that did not fit."""
    subject, body = names.subject(bus.run, "evals", "x"), bytes(1 << 20)
    for _ in range(64):
        try:
            await publisher.publish(subject, body, wait_when_full=False, deadline_s=DEADLINE_S)
        except StreamFullError as error:
            assert "maximum bytes exceeded" in str(error)
            return subject, body
    raise AssertionError("64 MiB fitted into a share of a 48 MiB store")


async def test_receipts_number_the_stream_and_the_run_travels(bus: Bus, publisher: Publisher) -> None:
    subject = names.subject(bus.run, "samples", "x")
    acks = [await publisher.publish(subject, b"a", headers={"Ph-Key": "k"}) for _ in range(3)]
    assert [ack.seq for ack in acks] == [1, 2, 3]
    assert (await log.get(bus, "samples", 2)).headers["Ph-Run"] == bus.run


async def test_a_message_id_is_stored_once(bus: Bus, publisher: Publisher) -> None:
    subject = names.subject(bus.run, "samples", "x")
    first = await publisher.publish(subject, b"a", message_id="e/1")
    again = await publisher.publish(subject, b"b", message_id="e/1")
    assert (again.seq, again.duplicate) == (first.seq, True)
    assert (await log.state(bus, "samples")).messages == 1
    assert publisher.stats.duplicates == 1


@pytest.mark.parametrize(
    ("messages", "size_bytes", "expected"),
    [(4, 1, 4), (100, 300, 3), (100, 5000, 1)],
    ids=["count", "bytes", "one large"],
)
async def test_the_window_bounds_what_is_unacknowledged(
    bus: Bus, messages: int, size_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(bus, window_messages=messages, window_bytes=1000)
    sent: list[str] = []
    full = asyncio.Event()

    async def publish(subject: str, data: bytes, **options: object) -> None:
        sent.append(subject)
        if len(sent) == expected:
            full.set()

    monkeypatch.setattr(bus.client, "publish", publish)
    tasks = [asyncio.create_task(publisher.publish(f"s.{i}", bytes(size_bytes))) for i in range(10)]
    await asyncio.wait_for(full.wait(), DEADLINE_S)
    for _ in range(20):
        await asyncio.sleep(0)  # every task has run as far as it can
    assert len(sent) == expected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (publisher._messages, publisher._bytes) == (0, 0)


async def test_waiting_for_the_window_counts_against_the_deadline(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = await Publisher(bus, window_messages=1).start()
    stall(monkeypatch, publisher)
    silent = names.subject(bus.run, "nowhere", "x")  # type: ignore[arg-type]
    holder = asyncio.create_task(publisher.publish(silent, b""))
    await asyncio.sleep(0)
    with pytest.raises(PublishTimeoutError, match=r"not acknowledged within 0\.2 s"):
        await publisher.publish(silent, b"", deadline_s=0.2)
    holder.cancel()


async def test_two_thousand_publishes_through_a_kill_are_each_stored_once(own_server: OwnServer, own_bus: Bus) -> None:
    """nats-py's own futures never finish after a restart; a repeated message must not be stored twice."""
    publisher = await Publisher(own_bus).start()
    subject = names.subject(own_bus.run, "samples", "x")
    count, half = 2000, asyncio.Event()

    async def one(number: int) -> int:
        ack = await publisher.publish(subject, b"%d" % number, message_id=f"m/{number}")
        if publisher.stats.published == count // 2:
            half.set()
        return ack.seq

    async with asyncio.timeout(40):
        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        await half.wait()
        own_server.kill()
        assert not all(task.done() for task in tasks)
        await own_server.start()
        sequences = await asyncio.gather(*tasks)
    stored = await log.get_many(own_bus, "samples", range(1, count + 1))
    assert (await log.state(own_bus, "samples")).messages == count
    assert sorted(int(entry.data) for entry in stored) == list(range(count))
    assert sorted(sequences) == list(range(1, count + 1))


async def test_a_full_stream_holds_the_publisher_and_lets_it_go_on(bus: Bus, publisher: Publisher) -> None:
    subject, body = await filled(publisher, bus)
    waiting = asyncio.create_task(publisher.publish(subject, body, message_id="late"))
    async with asyncio.timeout(DEADLINE_S):
        while not publisher.stats.waited_full:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    last = (await log.state(bus, "evals")).last
    await bus.api(f"STREAM.PURGE.{names.stream(bus.run, 'evals')}")
    assert (await asyncio.wait_for(waiting, DEADLINE_S)).seq == last + 1


async def test_a_full_stream_that_stays_full_ends_at_the_deadline(bus: Bus, publisher: Publisher) -> None:
    subject, body = await filled(publisher, bus)
    with pytest.raises(PublishTimeoutError, match="publish it again under the same id"):
        await publisher.publish(subject, body, deadline_s=0.3)


async def test_the_wrong_sequence_is_refused_with_the_right_one(bus: Bus, publisher: Publisher) -> None:
    subject = names.subject(bus.run, "ledger", "record")
    await publisher.publish(subject, b"1", expect_last_sequence=0)
    with pytest.raises(WrongSequenceError, match="last sequence: 1"):
        await publisher.publish(subject, b"2", expect_last_sequence=0)
    with pytest.raises(WrongSequenceError):
        await publisher.publish(subject, b"2", expect_last_subject_sequence=7)
    assert (await publisher.publish(subject, b"2", expect_last_subject_sequence=1)).seq == 2


async def test_a_lost_receipt_does_not_make_a_compare_and_set_lose_against_itself(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, lost = Publisher(bus), asyncio.Event()
    on_reply = publisher._on_reply

    async def lose_the_first(message: Msg) -> None:
        if lost.is_set():
            await on_reply(message)
        else:
            lost.set()
            publisher._retry_all()  # as a broken connection does

    monkeypatch.setattr(publisher, "_on_reply", lose_the_first)
    await publisher.start()
    subject = names.subject(bus.run, "ledger", "record")
    ack = await publisher.publish(subject, b"1", expect_last_sequence=0, deadline_s=DEADLINE_S)
    assert (ack.seq, ack.duplicate, publisher.stats.retried) == (1, True, 1)


async def test_a_subject_without_stream_ends_at_the_deadline(bus: Bus, publisher: Publisher) -> None:
    with pytest.raises(
        PublishTimeoutError, match=r"ph\.elsewhere\.x was not acknowledged within 0\.3 s; .*message id m/1"
    ):
        await publisher.publish("ph.elsewhere.x", b"", message_id="m/1", deadline_s=0.3)


async def test_a_message_above_the_limit_is_refused_with_both_numbers(bus: Bus, publisher: Publisher) -> None:
    size = (32 << 20) + 1
    with pytest.raises(BusRefusedError, match=f"{size} bytes for .* above the server's max_payload of {32 << 20}"):
        await publisher.publish(names.subject(bus.run, "samples", "x"), bytes(size))


async def test_a_closed_connection_is_named(bus: Bus, connect_again: Connect) -> None:
    other = await connect_again("other")
    publisher = await Publisher(other).start()
    await other.close()
    with pytest.raises(BusUnreachableError, match="the connection was closed"):
        await publisher.publish(names.subject(bus.run, "samples", "x"), b"")


async def test_nobody_at_the_url_is_named_with_the_remedy() -> None:
    with pytest.raises(BusUnreachableError, match=r"no NATS server .* at nats://127\.0\.0\.1:1 .*correct bus\.url"):
        await Bus.connect(Endpoint(url="nats://127.0.0.1:1"), "r", "test", deadline_s=0.5)


async def test_a_secret_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUS_TOKEN", raising=False)
    with pytest.raises(BusUnreachableError, match="the environment variable BUS_TOKEN, which is not set"):
        await Bus.connect(Endpoint(url="nats://127.0.0.1:1", token_env="BUS_TOKEN"), "r", "test")


async def test_a_denied_subject_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JetStream a publish that the account may not make looks like a timeout."""
    rules = (
        'authorization { users: [ { user: a, password: b, permissions: { publish: { deny: ["ph.*.samples.>"] } } } ] }'
    )
    server = WithRules(tmp_path / "bus", rules)
    monkeypatch.setenv("BUS_USER", "a")
    monkeypatch.setenv("BUS_PASSWORD", "b")
    endpoint = Endpoint(url=(await server.ensure()).url, user_env="BUS_USER", password_env="BUS_PASSWORD")
    denied = await Bus.connect(endpoint, "r-1", "test")
    try:
        publisher = await Publisher(denied).start()
        with pytest.raises(BusRefusedError, match=r"ph\.r-1\.samples\.Key was refused: .*permissions violation"):
            await publisher.publish(names.subject("r-1", "samples", "Key"), b"", deadline_s=DEADLINE_S)
    finally:
        await denied.close()
        await server.stop()


async def test_reads_outlive_a_broken_connection(own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    await publish_many(publisher, own_bus.run, "samples", 3)
    own_server.kill()
    reading = asyncio.create_task(log.state(own_bus, "samples"))
    await own_server.start()
    assert (await reading).messages == 3
