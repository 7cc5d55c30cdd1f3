"""A supervised run of stub actors, inside the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import supervisor_stub
import yaml

from physarum.actors.supervisor.process import ActorRecord, read_records
from physarum.actors.supervisor.stop import StopRequest
from physarum.actors.supervisor.supervisor import Supervisor
from physarum.bus.metrics import Metric
from physarum.bus.server import EmbeddedServer, ServerRecord
from physarum.configs.loader import resolve

LIMIT_S = 60.0
QUIET: dict[str, Any] = {"heartbeat_s": 0.3, "heartbeat_limit_s": 5.0, "backoff_s": 0.05, "drain_timeout_s": 10.0}


def write_config(folder: Path, stub: dict[str, str], **sections: Any) -> Path:
    """A configuration of four actors (checkpoint-0, source-0, trainer-0, janitor-0) that passes every check."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    values: dict[str, Any] = {
        "run": {"name": "stub", "root": str(folder / "runs")},
        "model": {"path": "model"},
        "source": {"hook": "physarum.agents.calculator.problems:Problems"},
        "trainer": {"objective": "sft", "lr": 1e-3, "groups_per_batch": 1},
        "rollout": {"count": 0, "generate": "physarum.agents.calculator.episode:generate"},
        "reward": {"count": 0, "hook": "physarum.agents.calculator.reward:exact_match"},
        "stop": {"steps": 3},
        "supervisor": QUIET,
        "extra": {"stub": stub},
    }
    path = folder / "stub.yaml"
    path.write_text(yaml.safe_dump({**values, **sections}))
    return path


class Watch:
    """An observer and reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self.said: list[str] = []

    def on_metric(self, metric: Metric) -> None:
        self.metrics.append(metric)

    async def observe(self, run: object) -> None:
        return

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.said.append(what)


class StubRun:
    """A supervisor at work. `ended` is its task."""

    command_for = staticmethod(supervisor_stub.command)

    def __init__(self, path: Path) -> None:
        self.config = resolve(path)
        self.stop = StopRequest()
        self.watch = Watch()
        self.started = asyncio.Event()
        self.supervisor = Supervisor(
            self.config,
            self.stop,
            self.watch,
            lambda config: self.watch,
            command_for=self.command_for,
            on_started=self.started.set,
        )
        self.folder = self.supervisor.folder
        self.ended = asyncio.create_task(self.supervisor.run())

    def record(self, instance: str) -> ActorRecord:
        return {record.instance: record for record in read_records(self.folder.actors)}[instance]

    def server(self) -> ServerRecord:
        found = EmbeddedServer(self.folder.bus).running()
        assert found is not None
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a fact of the outside world that announces itself to nobody."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                if self.ended.done():
                    raise AssertionError(f"the run ended before what the test waits for: {self.ended!r}")
                await asyncio.sleep(0.05)

    async def until_logged(self, instance: str, text: str) -> None:
        log = self.folder.logs / f"{instance}.log"
        await self.until(lambda: log.exists() and text in log.read_text())

    async def result(self) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            return await self.ended


@contextlib.asynccontextmanager
async def stub_run(path: Path) -> AsyncIterator[StubRun]:
    """Ends whatever the test leaves."""
    run = StubRun(path)
    try:
        yield run
    finally:
        run.stop.ask()
        run.stop.ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(run.ended, return_exceptions=True)


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that name the run's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in command):
                found.append(" ".join(command))
    return found
