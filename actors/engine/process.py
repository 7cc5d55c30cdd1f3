"""One SGLang server as a child: started under a guardian, watched, stopped, never left behind.

Invariant: when `stop` returns every process of the server is gone, and at once after this process died, however it died
(guardian.py). A server that ends by itself is reported with its last log lines as soon as the kernel knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from physarum.actors.address import http_url
from physarum.actors.engine.arguments import check_sampling, role_arguments, server_command
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import Device, detect_device, engine_environment
from physarum.actors.engine.errors import EngineDiedError, EngineStartTimeoutError
from physarum.actors.engine.opening import EVERYWHERE, LOOPBACK, Opening, key_file, write_key
from physarum.actors.engine.port import ReservedPort
from physarum.actors.engine.readiness import until_healthy
from physarum.actors.engine.schema import inspect_server
from physarum.configs.servers import ServerRole

_log = logging.getLogger(__name__)

_GUARDIAN: Final = Path(__file__).with_name("guardian.py")
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 64 * 1024
# What the guardian may take, beyond its own grace, to notice that the group is dead.
_GUARDIAN_MARGIN_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What to start. `label` is the version of the weights in `model`; `sglang` are the user's arguments, `sampling` names
    the parameters that the run's requests will carry.

    `grace_s`: an SGLang that is terminated looks around every 5 s and then kills its own workers, so waiting for it
    gains nothing; by default it is killed at once. Drain before stopping.
    """

    python: Path
    model: Path
    label: str
    log_file: Path
    sglang: Mapping[str, Any] = field(default_factory=dict)
    sampling: Collection[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    device: Device = field(default_factory=detect_device)
    grace_s: float = 0.0
    role: ServerRole = "regular"
    language_only: bool = False
    """Images are encoded by others, which register at `bootstrap_port`."""
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """Its place among the nodes of one engine (nodes.node_arguments); empty: it is alone."""
    opening: Opening | None = None
    """How other machines reach it; None: they do not."""


class ServerProcess:
    """An HTTP server under its guardian, on the first of `ports`. `what` it is, for messages."""

    key: str | None = None
    """What requests must carry; None: nothing."""
    announced: str
    """Its URL as others reach it."""

    def __init__(
        self,
        guardian: asyncio.subprocess.Process,
        ports: Sequence[ReservedPort],
        log_file: Path,
        grace_s: float,
        what: str,
    ) -> None:
        self.url = self.announced = f"http://127.0.0.1:{ports[0].number}"
        self._guardian, self._ports = guardian, ports
        self._log_file, self._grace_s, self._what = log_file, grace_s, what

    @property
    def pid(self) -> int:
        """Of the guardian, the parent of every process of the server."""
        return self._guardian.pid

    @property
    def returncode(self) -> int | None:
        return self._guardian.returncode

    async def wait_healthy(self, session: aiohttp.ClientSession, timeout_s: float, empty: bool = False) -> None:
        """Returns when the server has generated a token; `empty`: when it answers.

        Raises EngineDiedError at once when the process ends, EngineStartTimeoutError after `timeout_s`.
        """
        died = asyncio.create_task(self.wait_exit())
        healthy = asyncio.create_task(until_healthy(EngineControl(self.url, session, key=self.key), empty))
        try:
            done, _ = await asyncio.wait({died, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (died, healthy):
                task.cancel()
            await asyncio.gather(died, healthy, return_exceptions=True)
        if died in done:
            raise self.death(during="while it started")
        if not done:
            raise EngineStartTimeoutError(
                f"{self._what} {self.url} was not healthy within {timeout_s:g} s; raise engines.<group>.start_timeout_s or"
                f" see {self._log_file}, which ends:\n{self._tail()}"
            )
        await healthy
        self._free_ports()

    async def wait_exit(self) -> int:
        """The exit status, when there is one (an event of the kernel, not a poll)."""
        return await self._guardian.wait()

    def death(self, during: str = "while it served") -> EngineDiedError:
        """The error for an exit that nobody asked for, with the last lines of the log."""
        return EngineDiedError(
            f"{self._what} {self.url} ended with exit status {self.returncode} {during}; its log {self._log_file} ends:\n"
            f"{self._tail()}"
        )

    def _tail(self) -> str:
        """SGLang writes its arguments into its log; the key among them goes into no message."""
        text = log_tail(self._log_file)
        return text if self.key is None else text.replace(self.key, "***")

    async def stop(self) -> int:
        """Terminates the server, after `grace_s` kills it, and returns the exit status when all is gone. Idempotent."""
        self._free_ports()
        if self._guardian.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._guardian.terminate()
            try:
                await asyncio.wait_for(self._guardian.wait(), self._grace_s + _GUARDIAN_MARGIN_S)
            except TimeoutError:
                _log.error("guardian %d of %s %s does not end; it is killed", self.pid, self._what, self.url)
                self._guardian.kill()
        return await self._guardian.wait()

    def _free_ports(self) -> None:
        for port in self._ports:
            port.close()


class EngineProcess(ServerProcess):
    """Make one with `await EngineProcess.start(spec)`."""

    bootstrap_port: int | None = None
    """Of a prefill server: where decode servers ask for KV. Of one with encoders: where they are registered."""
    _key_file: Path | None = None

    @classmethod
    async def start(cls, spec: EngineSpec, cache: Path | None = None) -> EngineProcess:
        """Checks the arguments against the installed server, then starts it.

        Call it on the main thread: the guardian watches the process, but a parent must be there to reap it.
        Raises EngineArgumentError, EngineInspectionError.
        """
        environment = engine_environment(spec.device, spec.environment)
        schema = await inspect_server(spec.python, environment, cache)
        check_sampling(spec.sampling, schema)
        beside = spec.role == "prefill" or spec.language_only
        ports = [ReservedPort() for _ in range(2 if beside else 1)]
        try:
            own = {**role_arguments(spec.role, ports[-1].number, spec.language_only), **spec.nodes, **_opened(spec)}
            host = LOOPBACK if spec.opening is None else EVERYWHERE
            command = server_command(
                spec.python, spec.model, ports[0].number, spec.label, spec.sglang, spec.device, schema, own, host
            )
            guardian = await guarded(command, environment, spec.log_file, spec.grace_s)
        except BaseException:
            for port in ports:
                port.close()
            key_file(spec.log_file).unlink(missing_ok=True)
            raise
        _log.info("engine on port %d: %s", ports[0].number, " ".join(command))
        process = cls(guardian, ports, spec.log_file, spec.grace_s, "engine")
        process.bootstrap_port = ports[1].number if beside else None
        if spec.opening is not None:
            process.key, process._key_file = spec.opening.key, key_file(spec.log_file)
            process.announced = http_url(spec.opening.address, ports[0].number)
        return process

    def _free_ports(self) -> None:
        super()._free_ports()
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)


def _opened(spec: EngineSpec) -> dict[str, Any]:
    """The argument that opens it to other machines; its key is written, and its log is nobody else's to read."""
    if spec.opening is None:
        return {}
    path = key_file(spec.log_file)
    write_key(path, spec.opening.key)
    spec.log_file.touch(mode=0o600)
    spec.log_file.chmod(0o600)
    return {"config": str(path)}


def log_tail(file: Path, lines: int = _TAIL_LINES) -> str:
    """The last `lines` lines of a log, indented; says so when there are none."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"    (no log: {error.strerror})"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (the log is empty)"


async def guarded(
    command: list[str], environment: Mapping[str, str], log_file: Path, grace_s: float
) -> asyncio.subprocess.Process:
    """The guardian of `command`, whose output goes to the log."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_GUARDIAN), str(os.getpid()), str(grace_s), *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), start_new_session=True,
        )  # fmt: skip
