"""The trainer's broadcasts over a real bus: groups are formed beside publications, and nobody waits for an engine that left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from actor_fixture import make_context
from engine_fixture import engine_python

from physarum.actors.engine.environment import engine_environment
from physarum.actors.engine.listening import listen
from physarum.actors.trainer.broadcasting import Broadcasting, members_of
from physarum.bus.connection import Bus
from physarum.bus.presence import GONE, Heartbeat, Roster, announce
from physarum.bus.publisher import Publisher
from physarum.bus.version import Version
from physarum.weightsync.broadcast import MEMBER_FACT
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.transports.nccl import NcclTransport

pytestmark = pytest.mark.timeout(200)

LIMIT_S = 60.0


class Rig:
    """A trainer's broadcasts, and engines that hear of them."""

    def __init__(self, folder: Path, bus: Bus, publisher: Publisher, stack: contextlib.AsyncExitStack) -> None:
        self.folder, self.bus, self.publisher, self.stack = folder, bus, publisher, stack
        self.context = make_context(folder, bus, publisher, "trainer")
        self.broadcasting = Broadcasting(self.context, LIMIT_S)
        self.buffer = FlatBuffer(4096)
        self.engines = Roster(bus, "engine")

    async def join(self, instance: str, *, hears: bool = True) -> NcclTransport:
        """An engine; one that does not hear is there, and takes part in nothing."""
        agent = DeviceAgent(engine_python(), engine_environment("cpu"), self.folder / f"{instance}.log", LIMIT_S)
        transport = NcclTransport(cast(Any, None), agent, 1, LIMIT_S, instance)
        self.stack.push_async_callback(transport.close)
        if hears:
            actor = SimpleNamespace(bus=self.bus, publisher=self.publisher, config=self.context.config, facts={})
            listening = asyncio.create_task(listen(cast(Any, actor), transport))
            self.stack.callback(listening.cancel)
        await self.tell(instance, "ready")
        return transport

    async def tell(self, instance: str, state: str, started_at: float = 1.0) -> None:
        """What the engine says of itself; returns when the trainer has heard it."""
        beat = Heartbeat(role="engine", instance=instance, state=state, pid=1, host="here", started_at=started_at,
                         sequence=time.monotonic_ns(), facts={MEMBER_FACT: "nccl"})  # fmt: skip
        heard = asyncio.create_task(self._heard(instance, state, started_at))
        await announce(self.bus, self.publisher, beat)
        async with asyncio.timeout(20):
            await heard

    async def _heard(self, instance: str, state: str, started_at: float) -> None:
        while ((instance, started_at) in members_of(self.engines)) == (state == GONE):
            await self.engines.wait_change(20)

    def version(self, number: int) -> Manifest:
        tensors = {"a": torch.randn(3000, generator=torch.Generator().manual_seed(number))}
        snapshot = self.buffer.take(tensors.items).on_host(None, "")
        entries, _ = snapshot.entries()
        total = snapshot.total_bytes
        snapshot.close()
        return Manifest(version=Version("policy", 1, number), parent=None, model_digest="m", tensors=entries,
                        total_bytes=total, step=number, created=0.0)  # fmt: skip

    async def send(self, number: int) -> Manifest:
        manifest = self.version(number)
        async with asyncio.timeout(LIMIT_S):
            await self.broadcasting.send(manifest.version, self.buffer, self.engines)
        return manifest

    async def formed(self) -> None:
        assert self.broadcasting._forming is not None
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self.broadcasting._forming})


@contextlib.asynccontextmanager
async def rig(folder: Path, bus: Bus, publisher: Publisher) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        made = Rig(folder, bus, publisher, stack)
        stack.push_async_callback(made.broadcasting.close)
        await stack.enter_async_context(made.engines.open())
        yield made


async def arrived(transport: NcclTransport, manifest: Manifest) -> bool:
    found = await transport.arrived(manifest)
    await transport.clear()
    return found


async def test_no_version_waits_for_a_group_to_be_formed(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    async with rig(tmp_path, bus, publisher) as trainer:
        first = await trainer.join("engine-0")
        began = time.monotonic()
        missed = await trainer.send(1)
        assert time.monotonic() - began < 1.0, "a process with torch takes seconds to start"
        assert not await arrived(first, missed)
        await trainer.formed()
        assert await arrived(first, await trainer.send(2))
        second = await trainer.join("engine-1")
        missed = await trainer.send(3)
        assert not await arrived(first, missed) and not await arrived(second, missed)
        await trainer.formed()
        both = await trainer.send(4)
        assert await arrived(first, both) and await arrived(second, both)


async def test_an_engine_that_leaves_in_the_midst_of_a_round_ends_it(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    async with rig(tmp_path, bus, publisher) as trainer:
        stays = await trainer.join("engine-0")
        await trainer.join("engine-1", hears=False)
        await trainer.send(1)
        await trainer.formed()
        sending = asyncio.create_task(trainer.send(2))
        await trainer.tell("engine-1", GONE)
        began = time.monotonic()
        manifest = await sending
        assert not await arrived(stays, manifest)
        assert time.monotonic() - began < LIMIT_S / 2, "neither the trainer nor who stays waits for the deadline"
        await trainer.formed()
        assert await arrived(stays, await trainer.send(3))


async def test_an_engine_that_was_started_anew_is_in_no_old_group(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    async with rig(tmp_path, bus, publisher) as trainer:
        engine = await trainer.join("engine-0")
        await trainer.send(1)
        await trainer.formed()
        assert await arrived(engine, await trainer.send(2))
        await trainer.tell("engine-0", "ready", started_at=2.0)
        assert not await arrived(engine, await trainer.send(3))
        await trainer.formed()
        assert await arrived(engine, await trainer.send(4))
