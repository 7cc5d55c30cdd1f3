"""A real nats-server for tests: one per session, and one of its own for a test that kills it.

Every test works in a run of its own (streams of a fresh name, removed at the end), so tests on the shared server do not
see each other. The product's own launcher starts the server: what tests use is what runs use.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from physarum.bus import layout, names
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.server import EmbeddedServer, ServerRecord
from physarum.bus.work import WorkQueue
from physarum.configs.bus import BusConfig

DEADLINE_S = 20.0
"""No await in a test is longer than this; reaching it is a failure, never a result."""

Connect = Callable[[str], Awaitable[Bus]]


def small_config(**changes: object) -> BusConfig:
    """Limits of a few MiB: the server reserves what streams may take."""
    values: dict[str, object] = {"max_store_bytes": 48 << 20, "tasks_max_bytes": 4 << 20, "ack_wait_s": 1.0}
    return BusConfig.model_validate(values | changes)


def fresh_run() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


async def connect(url: str, run: str, name: str = "test", timeout_s: float = 5.0) -> Bus:
    return await Bus.connect(Endpoint(url=url, request_timeout_s=timeout_s), run, name)


class OwnServer:
    """A server that one test may kill and start again on the same port and store."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(folder)
        self.record: ServerRecord

    @property
    def url(self) -> str:
        return self.record.url

    async def start(self) -> ServerRecord:
        self.record = await self.server.ensure()
        return self.record

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        process = psutil.Process(self.record.pid)
        process.kill()
        process.wait(DEADLINE_S)

    async def kill_and_restart(self) -> None:
        self.kill()
        await self.start()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRecord]:
    """The session's server."""
    server = EmbeddedServer(tmp_path_factory.mktemp("bus"))
    # A loop of its own, set nowhere: tests run theirs beside it.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        record = runner.run(server.ensure())
        runner.run(_hold_store(record))
        try:
            yield record
        finally:
            runner.run(server.stop())


async def _hold_store(record: ServerRecord) -> None:
    """A stream that stays: a server whose last stream is deleted removes its folders, beside the next one's creation."""
    made = await connect(record.url, "anchor")
    await made.client.jetstream().add_stream(name="anchor", subjects=["anchor"])
    await made.close()


@pytest.fixture
def bus_config() -> BusConfig:
    return small_config()


@pytest_asyncio.fixture
async def bus(nats_server: ServerRecord, bus_config: BusConfig) -> AsyncIterator[Bus]:
    """A connected bus with the streams of a fresh run."""
    made = await connect(nats_server.url, fresh_run())
    try:
        await layout.create(made, bus_config)
        yield made
    finally:
        await remove_streams(made, bus_config)
        await made.close()


@pytest_asyncio.fixture
async def publisher(bus: Bus) -> Publisher:
    return await Publisher(bus).start()


@pytest_asyncio.fixture
async def connect_again(bus: Bus) -> AsyncIterator[Connect]:
    """More connections to the same run: other processes, as far as the server can tell."""
    made: list[Bus] = []

    async def another(name: str) -> Bus:
        made.append(await connect(bus.endpoint.url, bus.run, name))
        return made[-1]

    yield another
    for one in made:
        await one.close()


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[OwnServer]:
    """A server for this test alone."""
    own = OwnServer(tmp_path / "own-bus")
    await own.start()
    try:
        yield own
    finally:
        await own.server.stop()


@pytest_asyncio.fixture
async def own_bus(own_server: OwnServer) -> AsyncIterator[Bus]:
    """A connected bus with streams on `own_server`."""
    made = await connect(own_server.url, fresh_run())
    try:
        await layout.create(made, small_config())
        yield made
    finally:
        await made.close()


async def remove_streams(bus: Bus, config: BusConfig) -> None:
    streams = layout.stream_configs(bus.run, config)
    await asyncio.gather(*(bus.api(f"STREAM.DELETE.{stream.name}") for stream in streams))


@contextlib.asynccontextmanager
async def work_queue(
    bus: Bus, publisher: Publisher, *, durable: str = "tasks_p1", max_deliver: int = 5, ack_wait_s: float = 1.0
) -> AsyncIterator[WorkQueue]:
    """An open queue on TASKS."""
    queue = WorkQueue(bus, publisher, "tasks", durable, worker="test-0", ack_wait_s=ack_wait_s, max_deliver=max_deliver)
    async with queue.open():
        yield queue


async def publish_many(publisher: Publisher, run: str, key: StreamKey, count: int, *, prefix: str = "p1") -> None:
    """Messages `0` .. `count - 1`, one after the other in the stream, each under its own message id."""
    for number in range(count):
        subject = names.subject(run, key, prefix, str(number))
        await publisher.publish(subject, str(number).encode(), message_id=f"{key}/{number}", deadline_s=DEADLINE_S)
