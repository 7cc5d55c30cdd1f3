"""The owner's side of a device agent: one process, one call at a time, each with a deadline.

Invariant: after a failure nothing is known of the process, so it is killed; the next call starts another. Blocking: call
it from a thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from physarum.weightsync.device import wire
from physarum.weightsync.errors import DeviceError

_log = logging.getLogger(__name__)

_AGENT: Final = Path(__file__).with_name("agent.py")
STACKS_SIGNAL: Final = signal.SIGUSR1
_REAP_S: Final = 10.0
_STACKS_S: Final = 0.5
_COLLECTIVES: Final = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""The same on both sides, else the first broadcast fails; and as SGLang's servers have it."""


class DeviceAgent:
    """A process on one engine's device, in the engine's own Python and environment; started when it is first needed."""

    def __init__(self, python: Path, environment: Mapping[str, str], log_file: Path, start_timeout_s: float) -> None:
        self._python = python
        self._environment = _COLLECTIVES | dict(environment)
        self._log_file = log_file
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def call(self, name: str, timeout_s: float, descriptors: tuple[int, ...] = (), **arguments: Any) -> dict[str, Any]:
        """The agent's answer. Raises DeviceError."""
        with self._one_at_a_time:
            connection = self._started()
            return self._exchange(connection, name, timeout_s, descriptors, arguments)

    def close(self) -> None:
        """Ends the process, and frees what it holds. What is under way fails."""
        self._kill()

    def _exchange(
        self, connection: socket.socket, name: str, timeout_s: float, descriptors: tuple[int, ...], arguments: Any
    ) -> dict[str, Any]:
        try:
            connection.settimeout(timeout_s)
            wire.send(connection, {"call": name, **arguments}, descriptors)
            answer, _ = wire.receive(connection)
        except TimeoutError as error:
            self._show_stacks()
            self._kill()
            raise DeviceError(
                f"the device agent did not answer {name} within {timeout_s:g} s; it is started anew;"
                f" {self._log_file} says where it hung"
            ) from error
        except (OSError, EOFError) as error:
            status = self._kill()
            raise DeviceError(
                f"the device agent ended during {name} (status {status}): {error}; see {self._log_file}"
            ) from error
        if "error" in answer:
            self._kill()
            raise DeviceError(f"the device agent could not {name}: {answer['error']}")
        return answer

    def _started(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [str(self._python), str(_AGENT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, pass_fds=(theirs.fileno(),),
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise DeviceError(f"no device agent can be started with {self._python}: {error}") from error
        finally:
            theirs.close()
        self._connection = ours
        self._exchange(ours, "hello", self._start_timeout_s, (), {})
        return ours

    def _kill(self) -> int | None:
        """Its exit status."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            connection.close()
        if process is None:
            return None
        process.kill()
        try:
            return process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            _log.error(
                "device agent %d has not ended %g s after SIGKILL: its device or driver holds it. Another one takes its place;"
                " what it held on the device stays taken until it ends",
                process.pid, _REAP_S,
            )  # fmt: skip
            threading.Thread(target=process.wait, name=f"reaper of {process.pid}", daemon=True).start()
            return None

    def _show_stacks(self) -> None:
        """Where it hangs goes into its log, while it is still there."""
        process = self._process
        if process is not None:
            process.send_signal(STACKS_SIGNAL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STACKS_S)
