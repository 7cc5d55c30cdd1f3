"""Broadcasts between agents: what arrives is verified, and whoever dies or stays away costs a deadline and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_fixture import engine_python

from physarum.actors.engine.environment import engine_environment
from physarum.actors.trainer.broadcasting import adopted
from physarum.bus.version import Version
from physarum.weightsync.broadcast import Round
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.transports.nccl import NcclTransport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

LIMIT_S = 60.0
CHUNK = 4096


class NoEngine:
    """Nothing is loaded here."""


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3000, generator=generator), "b": torch.randn(7, generator=generator).to(torch.bfloat16)}


class Sender:
    """A trainer's agent and buffer."""

    def __init__(self, tmp_path: Path) -> None:
        self.agent = DeviceAgent(Path(sys.executable), os.environ, tmp_path / "sender.log", LIMIT_S)
        self.buffer = FlatBuffer(CHUNK)
        self.port = 0
        self.members: tuple[str, ...] = ()
        self.name = ""

    def version(self, number: int) -> Manifest:
        """Takes the weights with seed `number`."""
        snapshot = self.buffer.take(model(number).items).on_host(None, "")
        entries, _ = snapshot.entries()
        total = snapshot.total_bytes
        snapshot.close()
        return Manifest(
            version=Version("policy", 1, number), parent=None, model_digest="m", tensors=entries, total_bytes=total,
            step=number, created=0.0, metrics={},
        )  # fmt: skip

    def form(self, name: str, members: tuple[str, ...]) -> None:
        self.agent.close()
        self.name, self.members = name, members
        self.port = self.agent.call("open", LIMIT_S, host="127.0.0.1")["port"]
        self.agent.call("adopt", LIMIT_S, buffer=adopted(self.buffer))

    def round(self, manifest: Manifest, limit_s: float) -> Round:
        return Round(
            name=self.name, epoch=1, label=manifest.label, host="127.0.0.1", port=self.port, members=self.members,
            until=time.time() + limit_s,
        )  # fmt: skip

    async def send(self, manifest: Manifest, limit_s: float) -> None:
        arguments = {
            "name": self.name, "label": manifest.label, "layout": self.buffer.layout(), "size": self.buffer.size_bytes,
            "members": len(self.members), "timeout_s": limit_s,
        }  # fmt: skip
        await asyncio.to_thread(self.agent.call, "send", limit_s + 10, arguments=arguments)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    made = Sender(tmp_path)
    yield made
    made.agent.close()


@pytest_asyncio.fixture
async def receivers(tmp_path: Path) -> AsyncIterator[Callable[[str], NcclTransport]]:
    made: list[NcclTransport] = []

    def make(name: str) -> NcclTransport:
        agent = DeviceAgent(engine_python(), engine_environment("cpu"), tmp_path / f"{name}.log", LIMIT_S)
        transport = NcclTransport(NoEngine(), agent, 1, LIMIT_S, name)  # type: ignore[arg-type]
        made.append(transport)
        return transport

    yield make
    for transport in made:
        await transport.close()


async def test_every_version_reaches_all_verified(sender: Sender, receivers: Callable[[str], NcclTransport]) -> None:
    first, second = receivers("engine-0"), receivers("engine-1")
    sender.version(0)
    sender.form("1.1", ("engine-0", "engine-1"))
    for number in (1, 2):
        manifest = sender.version(number)
        one = sender.round(manifest, LIMIT_S)
        for receiver in (first, second):
            receiver.join(one)
        await sender.send(manifest, LIMIT_S)
        for receiver in (first, second):
            assert await receiver.arrived(manifest)
            await receiver.prepare(None, manifest, manifest.tensors)
            assert receiver.name == "nccl"
            await receiver.clear()
    third = receivers("engine-2")
    sender.form("1.2", ("engine-0", "engine-1", "engine-2"))
    manifest = sender.version(3)
    one = sender.round(manifest, LIMIT_S)
    everybody = (first, second, third)
    for receiver in everybody:
        receiver.join(one)
    await sender.send(manifest, LIMIT_S)
    for receiver in everybody:
        assert await receiver.arrived(manifest)
        await receiver.clear()


async def test_what_is_not_the_manifests_is_not_taken(
    sender: Sender, receivers: Callable[[str], NcclTransport]
) -> None:
    receiver = receivers("engine-0")
    other = sender.version(0)
    sender.form("1.1", ("engine-0",))
    manifest = sender.version(1)
    receiver.join(sender.round(manifest, LIMIT_S))
    await sender.send(manifest, LIMIT_S)
    pretended = Manifest(
        version=manifest.version, parent=None, model_digest="m", tensors=other.tensors, total_bytes=other.total_bytes,
        step=1, created=0.0, metrics={},
    )  # fmt: skip
    assert not await receiver.arrived(pretended)
    assert receiver.altered > 0 and receiver.name == "ipc"
    await receiver.clear()


@pytest.mark.slow
async def test_who_stays_away_costs_a_deadline_and_the_others_fetch(
    sender: Sender, receivers: Callable[[str], NcclTransport]
) -> None:
    receiver = receivers("engine-0")
    sender.version(0)
    sender.form("1.1", ("engine-0", "engine-1"))
    manifest = sender.version(1)
    receiver.join(sender.round(manifest, 8.0))
    with pytest.raises(DeviceError, match="could not send"):
        await sender.send(manifest, 3.0)
    assert not await receiver.arrived(manifest)
    await receiver.clear()
    sender.form("1.2", ("engine-0",))
    manifest = sender.version(2)
    receiver.join(sender.round(manifest, LIMIT_S))
    await sender.send(manifest, LIMIT_S)
    assert await receiver.arrived(manifest)
    await receiver.clear()


@pytest.mark.parametrize("victim", [pytest.param("sender", marks=pytest.mark.slow), "receiver"])
async def test_an_agent_killed_between_two_broadcasts_is_replaced(
    sender: Sender, receivers: Callable[[str], NcclTransport], victim: str
) -> None:
    receiver = receivers("engine-0")
    sender.version(0)
    sender.form("1.1", ("engine-0",))
    manifest = sender.version(1)
    receiver.join(sender.round(manifest, LIMIT_S))
    await sender.send(manifest, LIMIT_S)
    assert await receiver.arrived(manifest)
    await receiver.clear()
    agent = sender.agent if victim == "sender" else receiver.agent
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGKILL)
    manifest = sender.version(2)
    receiver.join(sender.round(manifest, 3.0))
    with pytest.raises(DeviceError):
        await sender.send(manifest, 2.0)
    assert not await receiver.arrived(manifest)
    await receiver.clear()
    sender.form("1.2", ("engine-0",))
    manifest = sender.version(3)
    receiver.join(sender.round(manifest, LIMIT_S))
    await sender.send(manifest, LIMIT_S)
    assert await receiver.arrived(manifest)
    await receiver.clear()


async def test_a_version_of_which_nothing_was_heard_is_fetched(receivers: Callable[[str], NcclTransport]) -> None:
    receiver = receivers("engine-0")
    nothing: Any = type("M", (), {"label": "policy@1.1", "tensors": ()})()
    assert not await receiver.arrived(nothing)
    await receiver.clear()
