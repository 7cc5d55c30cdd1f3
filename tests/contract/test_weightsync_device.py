"""The device agent fails in every way a process can: the engine serves what it served, and the next version arrives."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from checkpoint_service import TOKEN, Service, running_service
from engine_fixture import LiveEngine, engine_python, serve
from engine_requests import generate, spans, worst

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import engine_environment
from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.device import owner
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.publisher import upload
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.snapshot import Snapshot
from physarum.weightsync.staging import Staging
from physarum.weightsync.transports.ipc import IpcTransport

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-3


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running_service(tmp_path) as running:
        yield running


@pytest.fixture
def agent(tmp_path: Path) -> DeviceAgent:
    return DeviceAgent(engine_python(), engine_environment("cpu"), tmp_path / "agent.log", 60.0)


async def publish(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, tensors: dict[str, Any]
) -> Manifest:
    version = Version.parse(engine.next_label())
    snapshot = Snapshot.take(tensors.items())
    return await upload(snapshot, version, service.url, TOKEN, 30.0, session=session, model_digest="tiny", step=1)


@pytest.mark.asyncio
async def test_only_the_tensors_that_changed_reach_the_device(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, agent: DeviceAgent, tmp_path: Path
) -> None:
    control = EngineControl(engine.url, session)
    live = Version.parse(await serve(engine, control, seed=0))
    transport = IpcTransport(control, agent, 1, 60.0)
    receiver = Receiver(
        control, Staging(SharedArea(tmp_path / "area"), "engine-0"), session, live=live, transport=transport
    )
    whole = dict(engine.reference(2).state_dict())
    await receiver.apply(await publish(engine, service, session, whole), [service.url], TOKEN)
    changed = whole | {"lm_head.weight": engine.reference(3).state_dict()["lm_head.weight"]}
    record = await receiver.apply(await publish(engine, service, session, changed), [service.url], TOKEN)
    assert record.transport == "ipc" and record.bytes_applied == changed["lm_head.weight"].nbytes
    back = await publish(engine, service, session, whole)
    record = await receiver.apply(back, [service.url], TOKEN)
    assert record.bytes_applied == changed["lm_head.weight"].nbytes
    answer = await generate(engine, 3, tokens=8)
    assert spans(answer) == [(back.label, 0, 8)] and worst(engine, 3, answer, 0, 8, seed=2) < TOLERANCE
    await receiver.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["stage", pytest.param("payload", marks=pytest.mark.slow)])
async def test_an_agent_that_is_killed_leaves_the_engine_as_it_was(
    engine: LiveEngine,
    service: Service,
    session: aiohttp.ClientSession,
    agent: DeviceAgent,
    tmp_path: Path,
    moment: str,
) -> None:
    control = EngineControl(engine.url, session)
    live = Version.parse(await serve(engine, control, seed=0))
    transport = IpcTransport(control, agent, 1, 60.0)
    receiver = Receiver(
        control, Staging(SharedArea(tmp_path / "area"), "engine-0"), session, live=live, transport=transport
    )
    call, killed = agent.call, []

    def killing(name: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        if name == moment and not killed:
            call("hello", 60.0)
            assert agent.pid is not None
            killed.append(agent.pid)
            os.kill(agent.pid, signal.SIGKILL)
        return call(name, *arguments, **options)

    agent.call = killing  # type: ignore[method-assign]
    manifest = await publish(engine, service, session, dict(engine.reference(2).state_dict()))
    with pytest.raises(DeviceError, match=f"ended during {moment}"):
        await receiver.apply(manifest, [service.url], TOKEN)
    answer = await generate(engine, 3, tokens=8)
    assert spans(answer) == [(str(live), 0, 8)] and worst(engine, 3, answer, 0, 8, seed=0) < TOLERANCE
    await receiver.apply(manifest, [service.url], TOKEN)
    answer = await generate(engine, 4, tokens=8)
    assert spans(answer) == [(manifest.label, 0, 8)] and worst(engine, 4, answer, 0, 8, seed=2) < TOLERANCE
    await receiver.close()


def test_an_agent_that_does_not_answer_is_killed_at_its_deadline(agent: DeviceAgent) -> None:
    agent.call("hello", 60.0)
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGSTOP)
    stopped = agent.pid
    with pytest.raises(DeviceError, match=r"did not answer hello within 0\.2 s"):
        agent.call("hello", 0.2)
    assert not Path(f"/proc/{stopped}").exists()
    assert agent.call("hello", 60.0)["device"] == "cpu"
    agent.close()


def test_an_agent_that_hangs_says_where_before_it_is_killed(agent: DeviceAgent, tmp_path: Path) -> None:
    port = agent.call("open", 60.0, host="127.0.0.1")["port"]
    nobody = {"name": "1.1", "label": "v1", "layout": [], "size": 0, "members": 1, "timeout_s": 60.0}
    with pytest.raises(DeviceError, match=r"did not answer send within 0\.5 s.*agent\.log says where"):
        agent.call("send", 0.5, arguments=nobody)
    assert port and "in send" in (tmp_path / "agent.log").read_text()
    agent.close()


def test_an_agent_that_even_death_does_not_end_holds_nobody_up(
    agent: DeviceAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process whose device hangs stays in the kernel: whoever waited for its end for ever never published again."""
    agent.call("hello", 60.0)
    pid = agent.pid
    assert pid is not None
    monkeypatch.setattr(owner, "_REAP_S", 0.01)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    agent.close()
    monkeypatch.undo()
    assert f"device agent {pid} has not ended" in caplog.text
    assert agent.pid is None
    os.kill(pid, signal.SIGKILL)


def test_an_environment_without_torch_is_named(tmp_path: Path) -> None:
    missing = DeviceAgent(tmp_path / "no-python", {}, tmp_path / "agent.log", 10.0)
    with pytest.raises(DeviceError, match=r"no device agent can be started with .*no-python"):
        missing.call("hello", 1.0)
