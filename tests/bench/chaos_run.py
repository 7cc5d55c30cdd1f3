"""One run as a user has it (`actorctl up --detach`), and the means to kill any process of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_lock import holder
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.server import EmbeddedServer
from tests.bench.processes import ROOT, environment

SUPERVISOR: Final = "supervisor"
BUS: Final = "bus"
SERVER: Final = "/server"
"""Behind an engine's name: the inference server itself, not the actor that keeps it."""
STUB: Final = ROOT / "tests" / "stub_engine"
_UP_S: Final = 1200.0
"""The quick start may have to make its start model first."""
_END_S: Final = 900.0


class RunStuckError(Exception):
    """A run did not start or end in time; its last lines say where it stood."""


def stub_overrides(journal: Path) -> list[str]:
    """Engines that are the stub: started, watched and updated by the real engine actor."""
    return [
        f"engines.policy.python={sys.executable}",
        f"engines.policy.env.PYTHONPATH={STUB}",
        f"engines.policy.sglang.stub-log={journal}",
    ]


class ChaosRun:
    """A run in `root/name`. Its supervisor is started again by whoever kills it (`up`), and adopts what still runs."""

    def __init__(self, recipe: Path, root: Path, name: str, overrides: Sequence[str] = ()) -> None:
        self.folder = RunFolder(root / name)
        self._command = [sys.executable, "-m", "physarum.actors.actorctl", "up", "--detach", str(recipe)]
        self._command += [f"run.root={root}", f"run.name={name}", *overrides]

    def also(self, *overrides: str) -> None:
        """Further settings of the next start."""
        self._command += overrides

    async def up(self) -> None:
        """Returns when the supervisor has started (or adopted) all actors. Raises RunStuckError with its last lines."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
        )
        try:
            async with asyncio.timeout(_UP_S):
                output, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            raise RunStuckError(f"actorctl up did not return within {_UP_S:g} s") from error
        if process.returncode != 0:
            raise RunStuckError(
                f"actorctl up ended with {process.returncode}:\n{output.decode(errors='replace')[-4000:]}"
            )

    async def connect(self) -> Bus:
        endpoint = msgspec.json.decode(self.folder.endpoint.read_bytes(), type=Endpoint)
        return await Bus.connect(endpoint, self.folder.path.name, "chaos")

    def pid(self, victim: str) -> int:
        """The process of an actor (by instance), of an engine's server, of the supervisor or of the bus."""
        if victim == SUPERVISOR:
            found = holder(self.folder.path)
            return found.pid if found is not None else 0
        if victim == BUS:
            server = EmbeddedServer(self.folder.bus).running()
            return server.pid if server is not None else 0
        actor = victim.removesuffix(SERVER)
        pid = next((one.pid for one in read_records(self.folder.actors) if one.instance == actor), 0)
        return _served_by(pid) if victim != actor and pid else pid

    def kill(self, victim: str) -> int:
        """SIGKILL; the pid that it was sent to."""
        pid = self.pid(victim)
        if pid == 0:
            raise RunStuckError(f"{victim} has no process to kill")
        os.kill(pid, signal.SIGKILL)
        return pid

    async def ended(self) -> dict[str, Any]:
        """Waits until the supervisor has ended the run; its summary. Raises RunStuckError when there is none."""
        await asyncio.to_thread(self._wait, _END_S)
        if not self.folder.summary.is_file():
            raise RunStuckError(f"the run has ended without a summary; its last lines:\n{self.tail()}")
        summary: dict[str, Any] = json.loads(self.folder.summary.read_bytes())
        return summary

    def stop(self) -> None:
        """Ends whatever still runs, as Ctrl-C twice does; nothing when the run has ended."""
        for _ in range(2):
            if pid := self.pid(SUPERVISOR):
                os.kill(pid, signal.SIGINT)
        self._wait(60.0)
        for one in read_records(self.folder.actors):
            if one.alive:
                os.kill(one.pid, signal.SIGKILL)
        if pid := self.pid(BUS):
            os.kill(pid, signal.SIGKILL)

    def tail(self) -> str:
        log = self.folder.logs / "up.log"
        return log.read_text(errors="replace")[-3000:] if log.is_file() else "(no log)"

    def _wait(self, timeout_s: float) -> None:
        pid = self.pid(SUPERVISOR)
        if pid:
            try:
                psutil.Process(pid).wait(timeout_s)
            except psutil.NoSuchProcess:
                return
            except psutil.TimeoutExpired as error:
                raise RunStuckError(
                    f"the run did not end within {timeout_s:g} s; last lines:\n{self.tail()}"
                ) from error


def _served_by(actor: int) -> int:
    """Actor -> guardian -> server: the first process of the command that the guardian runs."""
    guardians = [child for child in psutil.Process(actor).children() if "guardian.py" in " ".join(child.cmdline())]
    servers = [server for guardian in guardians for server in guardian.children()]
    return servers[0].pid if servers else 0
