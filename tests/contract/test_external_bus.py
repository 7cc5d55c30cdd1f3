"""The NATS configurations in deploy/nats, unchanged, in real servers with TLS: what they let a run do, and what not."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from bus_fixture import DEADLINE_S

from physarum.bus import layout, names
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import BusError, BusRefusedError, BusUnreachableError
from physarum.bus.publisher import PubAck, Publisher
from physarum.bus.server import binary
from physarum.configs.bus import BusConfig

NATS = Path(__file__).resolve().parents[2] / "deploy" / "nats"
RUN = "calculator"
PASSWORD = "correct-horse-7"
OBSERVER_PASSWORD = "battery-staple-8"
CLUSTER = ("nats-0", "nats-1", "nats-2")
LISTENING = re.compile(r"Listening for client connections on 127\.0\.0\.1:(\d+)")
LEADER = re.compile(r"cluster metadata leader|new metadata leader")


class Server:
    """nats-server on a free port of 127.0.0.1, up when the constructor returns; its own words say when."""

    def __init__(self, config: Path, variables: dict[str, str], *arguments: str) -> None:
        command = [str(binary()), "-c", str(config), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", *arguments]
        environment = {"PATH": os.environ["PATH"], **variables}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._lines: list[str] = []
        self._ended = False
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait_for(LISTENING)[1])
        self.wait_for(re.compile("Server is ready"))

    def wait_for(self, words: re.Pattern[str], timeout_s: float = 30.0) -> re.Match[str]:
        """The first line of its log that matches; fails the test when it ends or stays silent."""

        def found() -> re.Match[str] | None:
            return next(filter(None, map(words.search, self._lines)), None)

        with self._said:
            self._said.wait_for(lambda: found() or self._ended, timeout_s)
            match = found()
        if match is None:
            self.stop()
            pytest.fail(f"nats-server did not say {words.pattern!r}:\n{''.join(self._lines)}")
        return match

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self._lines.append(line)
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10.0)
        self._reader.join(timeout=10.0)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A CA and one certificate by it, as the variables that the configurations read."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1", *CLUSTER)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    found = {"CA": folder / "ca.pem", "CERT": folder / "cert.pem", "KEY": folder / "key.pem"}
    return {f"PHYSARUM_BUS_{name}": str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def variables(tls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that deploy/nats/*.conf expect from the environment."""
    return {
        **tls,
        "PHYSARUM_BUS_NAME": CLUSTER[0],
        "PHYSARUM_BUS_STORE": str(tmp_path_factory.mktemp("store")),
        "PHYSARUM_CALCULATOR_PASSWORD": PASSWORD,
        "PHYSARUM_OBSERVER_PASSWORD": OBSERVER_PASSWORD,
        "PHYSARUM_ADMIN_PASSWORD": "admin-9",
    }


@pytest.fixture(scope="module")
def server(variables: dict[str, str]) -> Iterator[Server]:
    started = Server(NATS / "single.conf", variables)
    yield started
    started.stop()


@pytest.fixture
def settings(server: Server, tls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., BusConfig]:
    """`bus:` as docs/external-bus.md writes it, with user and password in the variables that it names."""

    def make(user: str = RUN, password: str = PASSWORD, **changes: object) -> BusConfig:
        monkeypatch.setenv("PHYSARUM_BUS_USER", user)
        monkeypatch.setenv("PHYSARUM_BUS_PASSWORD", password)
        values: dict[str, object] = {
            "url": f"tls://127.0.0.1:{server.port}",
            "user_env": "PHYSARUM_BUS_USER",
            "password_env": "PHYSARUM_BUS_PASSWORD",
            "tls_ca": Path(tls["PHYSARUM_BUS_CA"]),
        }
        return BusConfig.model_validate(values | changes)

    return make


async def connect(config: BusConfig, run: str = RUN, deadline_s: float = 10.0) -> Bus:
    assert config.url is not None
    return await Bus.connect(Endpoint.of(config, config.url), run, "test", deadline_s)


async def publish_once(bus: Bus, subject: str) -> PubAck:
    publisher = await Publisher(bus).start()
    return await publisher.publish(subject, b"body", message_id="one", deadline_s=20.0)


def check(config: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(binary()), "-t", "-c", str(NATS / config)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("config", ["single.conf", "cluster.conf"])
def test_server_accepts_the_configuration(config: str, variables: dict[str, str]) -> None:
    done = check(config, variables)
    assert done.returncode == 0, done.stderr


def test_variable_that_is_not_set_is_named_at_start(variables: dict[str, str]) -> None:
    done = check("single.conf", {name: value for name, value in variables.items() if "CALCULATOR" not in name})
    assert done.returncode != 0
    assert "PHYSARUM_CALCULATOR_PASSWORD" in done.stderr


def test_permissions_name_the_subjects_that_the_code_uses() -> None:
    accounts = (NATS / "accounts.conf").read_text()
    used = [names.subject(RUN, "samples", "x"), names.control_subject(RUN, "trainer", "0", "status")]
    assert all(subject.startswith("ph.calculator.") for subject in used)
    assert '"ph.calculator.>"' in accounts
    assert '"ph.calculator.control.*.*.status"' in accounts


async def test_run_makes_its_streams_with_default_sizes_and_publishes(settings: Callable[..., BusConfig]) -> None:
    config = settings()
    bus = await connect(config)
    await layout.create(bus, config)
    ack = await publish_once(bus, names.subject(RUN, "samples", "one"))
    info = await bus.api(f"STREAM.INFO.{names.stream(RUN, 'samples')}")
    assert (ack.seq, info["state"]["messages"]) == (1, 1)
    await bus.close()


async def test_wrong_password_is_named_as_the_cause(settings: Callable[..., BusConfig]) -> None:
    config = settings(password="wrong")
    with pytest.raises(BusUnreachableError, match=r"(?i)authorization") as caught:
        await connect(config, deadline_s=2.0)
    assert str(config.url) in str(caught.value)
    assert "wrong" not in str(caught.value), "a password is never repeated"


async def test_connections_that_are_refused_end_at_their_deadline(settings: Callable[..., BusConfig]) -> None:
    """One in hundreds used to hang for ever: the client swallows a cancellation that meets it in the wrong moment."""
    async with asyncio.timeout(DEADLINE_S):
        attempts = (connect(settings(password="wrong"), deadline_s=1.0) for _ in range(40))
        found = await asyncio.gather(*attempts, return_exceptions=True)
    assert {type(one) for one in found} == {BusUnreachableError}


async def test_unknown_authority_is_named_as_the_cause(settings: Callable[..., BusConfig], tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    with pytest.raises(BusUnreachableError, match=r"(?i)certificate"):
        await connect(settings(tls_ca=tmp_path / "other.pem"), deadline_s=2.0)


async def test_using_another_runs_subjects_is_refused_by_name(settings: Callable[..., BusConfig]) -> None:
    bus = await connect(settings(request_timeout_s=1.0), run="other")
    with pytest.raises(BusError, match=r'(?i)permissions violation.*"ph\.other\.'):
        await publish_once(bus, names.subject("other", "samples", "one"))
    await bus.close()


async def test_observer_reads_but_changes_nothing(settings: Callable[..., BusConfig]) -> None:
    config = settings()
    owner = await connect(config)
    await layout.create(owner, config)
    await owner.close()
    observer = await connect(settings(user="calculator-observer", password=OBSERVER_PASSWORD))
    stream = names.stream(RUN, "ledger")
    info = await observer.api(f"STREAM.INFO.{stream}")
    assert info["config"]["name"] == stream
    with pytest.raises(BusUnreachableError, match=r"STREAM\.PURGE"):
        await observer.api(f"STREAM.PURGE.{stream}", timeout_s=1.0)
    subject = names.subject(RUN, "ledger", "forged")
    with pytest.raises(BusRefusedError, match=re.escape(subject)):
        await publish_once(observer, subject)
    await observer.close()


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(taken.getsockname()[1]) for taken in held]
    for taken in held:
        taken.close()
    return ports


@pytest.fixture
def start_member(variables: dict[str, str], tmp_path: Path) -> Iterator[Callable[[int, int], Server]]:
    """Starts a server of cluster.conf that is told of the first `known`; only the addresses differ from three hosts."""
    ports = free_ports(len(CLUSTER))
    started: list[Server] = []

    def start(index: int, known: int) -> Server:
        name = CLUSTER[index]
        own = {**variables, "PHYSARUM_BUS_NAME": name, "PHYSARUM_BUS_STORE": str(tmp_path / name)}
        routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports[:known])
        arguments = ("--cluster", f"nats://127.0.0.1:{ports[index]}", "--routes", routes)
        started.append(Server(NATS / "cluster.conf", own, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def lead(servers: list[Server]) -> None:
    """Before that a request to JetStream is answered by nobody."""
    for server in servers:
        server.wait_for(LEADER)


@pytest.mark.slow
async def test_a_cluster_that_lacks_a_server_is_waited_for_then_refused_with_the_number(
    start_member: Callable[[int, int], Server], settings: Callable[..., BusConfig]
) -> None:
    two = [start_member(index, 2) for index in range(2)]
    lead(two)
    url = ",".join(f"tls://127.0.0.1:{server.port}" for server in two)
    config = settings(url=url, request_timeout_s=20.0, replicas=3, start_timeout_s=30.0)
    bus = await connect(config, deadline_s=20.0)
    with pytest.raises(BusRefusedError, match=r"`bus\.replicas: 3` needs as many servers of the cluster up"):
        await layout.create(bus, config.model_copy(update={"start_timeout_s": 0.5}))
    creation = asyncio.create_task(layout.create(bus, config))
    await asyncio.to_thread(start_member, 2, 3)
    await creation
    info = await bus.api(f"STREAM.INFO.{names.stream(RUN, 'samples')}")
    assert {info["cluster"]["leader"], *(one["name"] for one in info["cluster"]["replicas"])} == set(CLUSTER)
    await bus.close()


@pytest.mark.slow
async def test_cluster_keeps_what_it_acknowledged_when_a_server_is_killed(
    start_member: Callable[[int, int], Server], settings: Callable[..., BusConfig]
) -> None:
    cluster = [start_member(index, 3) for index in range(3)]
    lead(cluster)
    url = ",".join(f"tls://127.0.0.1:{server.port}" for server in cluster)
    config = settings(url=url, request_timeout_s=20.0, replicas=3)
    bus = await connect(config, deadline_s=20.0)
    await layout.create(bus, config)
    publisher = await Publisher(bus).start()
    stream = names.stream(RUN, "samples")
    for key in range(20):
        await publisher.publish(names.subject(RUN, "samples", str(key)), b"x", message_id=str(key), deadline_s=30.0)
    leader = (await bus.api(f"STREAM.INFO.{stream}"))["cluster"]["leader"]
    cluster[CLUSTER.index(leader)].stop()
    for key in range(20, 40):
        await publisher.publish(names.subject(RUN, "samples", str(key)), b"x", message_id=str(key), deadline_s=60.0)
    info = await bus.api(f"STREAM.INFO.{stream}")
    assert info["state"]["messages"] == 40
    assert info["state"]["last_seq"] == 40
    await bus.close()
