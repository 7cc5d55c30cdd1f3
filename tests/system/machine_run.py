"""Two machines of one run on this host: two supervisors in one event loop, each with a root of its own, stub actors, and the
real checkpoint actor, which gives the start model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import supervisor_stub
from supervisor_run import LIMIT_S, StubRun, Watch, write_config

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.launcher import actor_command
from physarum.actors.supervisor.machine import MachineSupervisor
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.stop import StopRequest
from physarum.configs.loader import resolve

MACHINE = "gpu-0"
TOKEN = "PHYSARUM_TEST_TOKEN"


def command(folder: RunFolder, role: str, instance: str) -> list[str]:
    return (
        actor_command(folder, role, instance)
        if role == "checkpoint"
        else supervisor_stub.command(folder, role, instance)
    )


def write_machines(folder: Path, url: str, name: str, stub: dict[str, str], **sections: Any) -> Path:
    """As `supervisor_run.write_config`, with two rollout actors and a reward actor on gpu-0."""
    values = {
        "run": {"name": name, "root": str(folder / "runs"), "orphan_timeout_s": 30.0},
        "bus": {"url": url, "max_store_bytes": 48 << 20, "tasks_max_bytes": 4 << 20},
        "checkpoint": {"token_env": TOKEN},
        "machines": {"gpu": {"count": 1, "rollout": 2, "reward": 1}},
        "rollout": {"generate": "physarum.agents.calculator.episode:generate"},
        "reward": {"hook": "physarum.agents.calculator.reward:exact_match"},
    }
    path = write_config(folder, stub, **{**values, **sections})
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return path


class HeadRun(StubRun):
    command_for = staticmethod(command)


class MachineRun:
    """The supervisor of gpu-0 at work. `ended` is its task."""

    def __init__(self, path: Path) -> None:
        self.stop, self.watch, self.started = StopRequest(), Watch(), asyncio.Event()
        self.supervisor = MachineSupervisor(
            resolve(path), MACHINE, self.stop, self.watch, command_for=command, on_started=self.started.set
        )
        self.folder = self.supervisor.folder
        self.ended = asyncio.create_task(self.supervisor.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a fact of the outside world that announces itself to nobody."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                if self.ended.done():
                    raise AssertionError(f"the machine ended before what the test waits for: {self.ended!r}")
                await asyncio.sleep(0.05)

    async def until_at_work(self) -> None:
        await self.until(self.started.is_set)
        for instance in ("rollout-0", "rollout-1", "reward-0"):
            log = self.folder.logs / f"{instance}.log"
            await self.until(lambda log=log: log.exists() and "-> ready" in log.read_text())  # type: ignore[misc]

    def pids(self) -> dict[str, int]:
        return {record.instance: record.pid for record in read_records(self.folder.actors) if record.alive}

    async def lose(self) -> None:
        """The power fails: the supervisor and all that it started are gone without a word."""
        self.ended.cancel()
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        await asyncio.gather(self.ended, return_exceptions=True)

    async def result(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.ended


@contextlib.asynccontextmanager
async def at_work(*runs: HeadRun | MachineRun) -> AsyncIterator[None]:
    """Ends whatever the test leaves, the machines first."""
    try:
        yield
    finally:
        for run in reversed(runs):
            run.stop.ask()
            run.stop.ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.gather(run.ended, return_exceptions=True)
