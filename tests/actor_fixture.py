"""Actors in tests: a context over the test's own run, and an actor that runs beside the test until it is drained."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from bus_fixture import DEADLINE_S

from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.runtime import Actor
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.loader import dump, resolve
from physarum.configs.overrides import parse_command_line

T = TypeVar("T", bound=msgspec.Struct)

BASE = """\
run: {name: test}
bus: {ack_wait_s: 2.0, max_deliver: 2, fetch_timeout_s: 1.0}
model: {path: .}
source: {hook: "physarum.agents.calculator.problems:Problems", group_size: 2}
rollout: {generate: "physarum.agents.calculator.episode:generate"}
reward: {hook: "physarum.agents.calculator.reward:exact_match"}
engines: {policy: {}}
trainer: {objective: rl, lr: 1e-4, groups_per_batch: 2}
age: {bound: 1}
stop: {steps: 10}
"""


def make_context(
    folder: Path, bus: Bus, publisher: Publisher, role: str, *overrides: str, instance: str | None = None
) -> Context:
    """A context with BASE and `overrides` (dotted, as on the command line)."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(BASE)
    config = resolve(recipe, parse_command_line(list(overrides)))
    identity = Identity(bus.run, role, instance or f"{role}-0")
    return Context(identity, config, RunFolder(folder / bus.run), bus.endpoint, bus, publisher)


@contextlib.asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[asyncio.Task[None]]:
    """The actor's work; drained at the end of the block. An error of the actor ends the block at once and is raised."""
    body = asyncio.current_task()
    assert body is not None
    work = asyncio.create_task(actor.run(), name=str(actor.context.identity))

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            body.cancel()

    work.add_done_callback(ended)
    try:
        yield work
        actor.context.drain()
        async with asyncio.timeout(DEADLINE_S):
            await work
    finally:
        work.remove_done_callback(ended)
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def register_until(register: Register[T], satisfied: Callable[[T], bool], *key: str) -> T:
    """The value of a register key once it satisfies the condition."""
    async with asyncio.timeout(DEADLINE_S), register.watch(*key) as changed:
        while True:
            changed.clear()
            value = (await register.get(*key)).value
            if value is not None and satisfied(value):
                return value
            await changed.wait()


class ActorProcess:
    """A real actor process over the test's run, as a supervisor starts it; its standard error goes to a file."""

    def __init__(self, context: Context) -> None:
        identity, folder = context.identity, context.folder
        folder.bus.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(dump(context.config))
        folder.endpoint.write_bytes(msgspec.json.encode(context.endpoint))
        self.log = folder.path / f"{identity.instance}.log"
        command = [sys.executable, "-m", "physarum.actors.main", str(folder.path), identity.role, identity.instance]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)

    def kill(self) -> None:
        """SIGKILL to the actor alone; what it started must end by itself."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def drain(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def actor_process(context: Context) -> Iterator[ActorProcess]:
    """An actor process that is gone at the end of the block."""
    made = ActorProcess(context)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.kill()


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds, for conditions that no event announces; a deadline is a failure."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)
