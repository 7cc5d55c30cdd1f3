"""Leases, ports and identities under abuse: crash cycles leak nothing, clashes and strangers are refused."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import psutil
import pytest
from actor_fixture import eventually, make_context
from bus_fixture import DEADLINE_S, Connect, connect, fresh_run, publish_many, small_config
from nats.aio.msg import Msg
from reward_hooks import by_prompt

from physarum.actors.reward.actor import RewardActor
from physarum.actors.wire import publish_execution
from physarum.bus import layout, log, names
from physarum.bus.claims import ClaimRecord
from physarum.bus.connection import Bus
from physarum.bus.errors import ForeignRunError
from physarum.bus.log import LogReader
from physarum.bus.names import RUN_HEADER
from physarum.bus.publisher import Publisher
from physarum.bus.pull import Puller
from physarum.bus.register import Register
from physarum.bus.server import EmbeddedServer
from physarum.bus.work import WorkQueue
from physarum.configs.bus import BusConfig

pytestmark = pytest.mark.timeout(90)

CAPACITY = 8
CYCLES = 1000
LONG_S = 600.0


@pytest.fixture
def bus_config() -> BusConfig:
    """Nothing comes back by itself within these tests."""
    return small_config(ack_wait_s=LONG_S)


async def ack_pending(bus: Bus) -> int:
    found = await bus.api(f"CONSUMER.INFO.{names.stream(bus.run, 'tasks')}.tasks_p1")
    return int(found["num_ack_pending"])


async def test_a_thousand_crashes_leak_no_lease(bus: Bus, publisher: Publisher) -> None:
    """A worker leases a task and dies; the janitor returns the message. Never more leases than tasks, none lost."""
    await publish_many(publisher, bus.run, "tasks", CAPACITY)
    for cycle in range(CYCLES):
        puller = await Puller(bus, names.stream(bus.run, "tasks"), "tasks_p1").start()
        (message,) = await puller.fetch(1, 5.0)
        await puller.stop()  # the process is gone: it does nothing more with what it leased
        await bus.client.publish(message.reply, Msg.Ack.Nak)
        if cycle % 100 == 0:
            assert await ack_pending(bus) <= CAPACITY
    async with WorkQueue(
        bus, publisher, "tasks", "tasks_p1", worker="w", ack_wait_s=LONG_S, max_deliver=2 * CYCLES
    ).open() as queue:
        assert len(await queue.fetch(CAPACITY, 5.0)) == CAPACITY
        assert await ack_pending(bus) == CAPACITY


async def test_a_slow_judge_does_not_hold_up_a_stop(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """The reward hook hangs, and a process that it started, too: stopped within a second, its execution goes back."""
    from test_reward_actor import HOOKS, alive, execution

    hook, folder = f"reward.hook={HOOKS}:{by_prompt.__name__}", f"reward.args.folder={tmp_path}"
    actor = RewardActor(make_context(tmp_path, bus, publisher, "reward", hook, folder))
    await publish_execution(actor.context, "episodes", execution(bus.run, "a", "hang"))
    work = asyncio.create_task(actor.run())
    await eventually(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text() != "")
    began = time.monotonic()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    assert time.monotonic() - began < 1.0
    await eventually(lambda: not alive(int((tmp_path / "child").read_text())))
    async with WorkQueue(
        bus, publisher, "episodes", "episodes_train", worker="next", ack_wait_s=LONG_S, max_deliver=5
    ).open() as queue:
        (again,) = await queue.fetch(1, 5.0)
    assert again.deliveries == 2


async def test_fifty_servers_started_at_once_have_fifty_ports(tmp_path: Path) -> None:
    """Ports are chosen by the system when it binds them; a port that is asked for first may be taken meanwhile."""
    servers = [EmbeddedServer(tmp_path / str(number), start_timeout_s=60.0) for number in range(50)]
    try:
        records = await asyncio.gather(*(server.ensure() for server in servers))
        ports = [port for record in records for port in (record.port, record.monitor_port)]
        assert len(set(ports)) == 100
        assert all(psutil.pid_exists(record.pid) for record in records)
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def test_two_runs_on_one_server_do_not_meet(bus: Bus, publisher: Publisher) -> None:
    """The same names, keys and message ids in both: each sees its own."""
    other = await connect(bus.endpoint.url, fresh_run())
    try:
        await layout.create(other, small_config())
        theirs = await Publisher(other).start()
        await publish_many(publisher, bus.run, "tasks", 3)
        await publish_many(theirs, other.run, "tasks", 5)
        assert len(await log.scan(bus, "tasks")) == 3
        assert len(await log.scan(other, "tasks")) == 5
    finally:
        await asyncio.gather(
            *(other.api(f"STREAM.DELETE.{stream.name}") for stream in layout.stream_configs(other.run, small_config()))
        )
        await other.close()


async def test_a_stranger_in_a_register_is_refused_and_counted(bus: Bus, publisher: Publisher) -> None:
    """A value on our subject with another run's id: a process of another run with our subjects in its configuration."""
    register: Register[ClaimRecord] = Register(bus, publisher, "claims", ClaimRecord)
    await bus.client.publish(register.subject("x"), b"\x80", headers={RUN_HEADER: "another"})
    await bus.flush()
    with pytest.raises(ForeignRunError, match=f"'another'.*expected '{bus.run}'"):
        await register.get("x")
    assert bus.foreign_messages == 1
    assert await register.entries() == []


async def test_whoever_watches_everything_stops_nobody(bus: Bus, publisher: Publisher, connect_again: Connect) -> None:
    """Somebody looks at all subjects with a tool; whoever connects or subscribes after that used to wait in vain."""
    seen: list[Msg] = []

    async def look(message: Msg) -> None:
        seen.append(message)

    await bus.subscribe(">", look)
    late = await connect_again("late")
    began = time.monotonic()
    await late.subscribe(names.all_subjects(late.run, "metrics"), look)
    reader = LogReader(late, "dead")
    await publish_many(publisher, bus.run, "dead", 1)
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(reader.batches(0.5)) as batches:
        assert [entry.data for entry in await anext(batches)] == [b"0"]
    assert time.monotonic() - began < late.timeout_s
