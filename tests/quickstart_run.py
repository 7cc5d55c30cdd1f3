"""One run of the quick start as a user starts it: `actorctl up`, its printed lines, its files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from physarum.bus import ledger
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.server import EmbeddedServer

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"


class QuickstartRun:
    """`actorctl up configs/quickstart.yaml`, or one that extends it, with overrides, in a folder of its own."""

    def __init__(self, folder: Path, name: str, *overrides: str, config: Path = CONFIG) -> None:
        self.folder = folder / name
        # The start model is made by runs of other names, whose steps are not this run's.
        self._step = re.compile(rf"^{re.escape(name)}: step (\d+)/")
        command = [sys.executable, "-m", "physarum.actors.actorctl", "up", str(config)]
        self._process = subprocess.Popen(
            [*command, f"run.root={folder}", f"run.name={name}", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []

    def read(self, on_step: Callable[[int], None] = lambda step: None) -> int:
        """Reads to the end, calling `on_step` at each step's line; returns the exit status."""
        for line in self._lines():
            found = self._step.search(line)
            if found is not None:
                on_step(int(found[1]))
        return self._process.wait()

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        with self.folder.with_suffix(".out").open("w", buffering=1) as kept:  # also of a run that never ends
            for line in self._process.stdout:
                self.lines.append(line.rstrip())
                kept.write(line)
                yield line

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def pid(self, instance: str) -> int:
        """The pid of an actor, from the supervisor's own record."""
        return int(json.loads((self.folder / "actors" / f"{instance}.json").read_text())["pid"])

    def kill(self, instance: str) -> None:
        os.kill(self.pid(instance), signal.SIGKILL)

    def log(self, instance: str) -> str:
        return (self.folder / "logs" / f"{instance}.log").read_text(errors="replace")

    def ledger(self) -> list[ledger.Numbered]:
        """Every record of the finished run's ledger, read from its store."""
        return asyncio.run(_read_ledger(self.folder))

    def end(self) -> None:
        """Stops whatever still runs, as Ctrl-C twice does."""
        for _ in range(2):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)


async def _read_ledger(folder: Path) -> list[ledger.Numbered]:
    server = EmbeddedServer(folder / "bus")
    record = await server.ensure()
    try:
        bus = await Bus.connect(Endpoint(url=record.url), folder.name, "test")
        try:
            return await ledger.read(bus)
        finally:
            await bus.close()
    finally:
        await server.stop()
