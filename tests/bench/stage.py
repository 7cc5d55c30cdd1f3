"""A run folder with its own server and streams, as the supervisor leaves it for its actors, and a connection to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from physarum.actors import states
from physarum.actors.context import Context, Identity, RunFolder
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.bus import layout, ledger
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.ledger import StepRecord
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.server import EmbeddedServer
from physarum.configs.loader import dump, resolve
from physarum.configs.overrides import parse_command_line


@dataclass
class Stage:
    """`context` is the bench's own; `server` the process of the bus."""

    context: Context
    server: psutil.Process

    @property
    def bus(self) -> Bus:
        return self.context.bus

    def register(self, kind: type[Any]) -> Register[Any]:
        return Register(self.bus, self.context.publisher, "run", kind)

    async def steps(self) -> list[StepRecord]:
        return [item.record for item in await ledger.read(self.bus) if isinstance(item.record, StepRecord)]

    async def actor_context(self, role: str) -> Context:
        """For an actor inside this process: a window of its own over the same connection."""
        own = self.context
        identity = Identity(self.bus.run, role, f"{role}-0")
        return Context(identity, own.config, own.folder, own.endpoint, self.bus, await Publisher(self.bus).start())

    async def until_done(self, timeout_s: float) -> None:
        """Until the trainer says that training has ended."""
        done = self.register(states.TrainerDone)
        async with asyncio.timeout(timeout_s), done.watch(states.TRAINER_DONE) as changed:
            while (await done.get(states.TRAINER_DONE)).value is None:
                await changed.wait()
                changed.clear()


@contextlib.asynccontextmanager
async def open_stage(folder: Path, recipe: Path, overrides: Sequence[str]) -> AsyncIterator[Stage]:
    """The run `folder`; its server ends with the block."""
    place = [f"run.root={folder.parent}", f"run.name={folder.name}"]
    config = resolve(recipe, parse_command_line([*place, *overrides]))
    run = RunFolder(config.run.folder)
    run.bus.mkdir(parents=True)
    save_tokenizer(run.start_model)
    (run.start_model / "config.json").write_text("{}")
    run.config.write_text(dump(config))
    server = EmbeddedServer(run.bus)
    record = await server.ensure()
    endpoint = Endpoint.of(config.bus, record.url)
    run.endpoint.write_bytes(msgspec.json.encode(endpoint))
    bus = await Bus.connect(endpoint, config.run.name, "bench")
    try:
        await layout.create(bus, config.bus)
        publisher = await Publisher(bus).start()
        context = Context(Identity(bus.run, "bench", "bench-0"), config, run, endpoint, bus, publisher)
        yield Stage(context, psutil.Process(record.pid))
    finally:
        await bus.close()
        await server.stop()
