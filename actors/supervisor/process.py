"""One live actor process, held by pidfd: started or adopted, watched without polling, ended with all its children.

Invariants: signals go through the pidfd, so a reused pid is never hit; only processes of the actor's own session are
ever killed; when a process has ended, what it left behind in its session is killed before its exit is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from physarum.actors.supervisor.policy import Exit
from physarum.actors.supervisor.run_folder import write_atomic
from physarum.bus.process_clock import is_alive, started_s

_TAIL_BYTES: Final = 16 << 10


class ActorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`actors/INSTANCE.json`: who runs where; `log_start` is in bytes.

    `started_at` is Unix time, for people. `started_s` (seconds from boot) guards against a reused pid: a clock that is set
    does not move it.
    """

    role: str
    instance: str
    pid: int
    started_at: float
    restarts: int
    gpus: tuple[int, ...]
    log: str
    log_start: int
    started_s: float = 0.0

    @property
    def alive(self) -> bool:
        return is_alive(self.pid, self.started_s)


def record_path(actors: Path, instance: str) -> Path:
    return actors / f"{instance}.json"


def read_records(actors: Path) -> list[ActorRecord]:
    """Every actor that was started here and not cleared away since, by instance."""
    return [msgspec.json.decode(path.read_bytes(), type=ActorRecord) for path in sorted(actors.glob("*.json"))]


class ActorProcess:
    """Make it by `start` or `adopt`, inside a running event loop."""

    def __init__(self, record: ActorRecord, child: subprocess.Popen[bytes] | None, pidfd: int) -> None:
        self.record = record
        self._child = child
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        self._exit = Exit(None)
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], record: ActorRecord, actors: Path
    ) -> ActorProcess:
        """Starts `command` in a session of its own; `record` says everything but pid, start time and log position."""
        with Path(record.log).open("ab") as log:
            log_start = log.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        # Not reaped yet, so the pid is still its own even if it has ended already.
        pidfd = os.pidfd_open(child.pid)
        record = msgspec.structs.replace(
            record, pid=child.pid, started_at=time.time(), started_s=started_s(child.pid) or 0.0, log_start=log_start
        )
        try:
            write_atomic(record_path(actors, record.instance), msgspec.json.encode(record))
        except OSError:
            # Without a record nobody would find it again: a full disk must not leave a process behind.
            child.kill()
            child.wait()
            os.close(pidfd)
            raise
        return cls(record, child, pidfd)

    @classmethod
    def adopt(cls, record: ActorRecord) -> ActorProcess | None:
        """The process of `record` when it still runs: its last supervisor ended and left it working."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            return None
        if not record.alive:
            os.close(pidfd)
            return None
        return cls(record, None, pidfd)

    async def wait(self) -> Exit:
        """How it ended. Any number of tasks may wait."""
        await self._ended.wait()
        return self._exit

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, to it and to every process of its session."""
        self._signal(signal.SIGKILL)

    def log_tail(self, lines: int = 15) -> str:
        """Its own last lines: earlier incarnations wrote to the same file before `log_start`."""
        return log_tail(Path(self.record.log), lines, start=self.record.log_start)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Before the zombie is reaped: until then the session's number cannot be anybody else's.
        end_session(self.record.pid)
        if self._child is not None:
            self._exit = Exit(self._child.wait())
        self._ended.set()


def end_session(session: int) -> None:
    """Kills what is left of a session whose leader has ended; nothing when the leader's pid was given to somebody else."""
    try:
        if psutil.Process(session).status() != psutil.STATUS_ZOMBIE:
            return
    except psutil.NoSuchProcess:
        pass
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != session and os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def log_tail(path: Path, lines: int, start: int = 0) -> str:
    """The last `lines` lines of a log from byte `start` on; says so when there are none."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            # A log that was cut since (log_bound.py) begins anew.
            log.seek(max(start if start <= end else 0, end - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(it wrote nothing)"
