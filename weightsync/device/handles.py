"""Hands a version to an engine as checkpoint-engine's parameter server does: one ZeroMQ socket for each of its devices.

    here (REQ, binds)                     the engine, at /update_weights_from_ipc (REP, connects)
      how to map the buffer        ->     maps it                                -> "", or its traceback and the end
      [{name, dtype, shape, offset}] ->   load_weights                           -> "", or its traceback
      None                         ->     lets go of the buffer                  -> ""
      None                         ->     its last hook                          -> ""

An engine with a draft model does this once for each of its models, so whoever comes is answered until `close`. All tensors are
one message: some models join tensors within one load, and they are on the device already. checkpoint-engine >= 0.4
(checkpoint_engine/worker.py); before that there was one None. Messages are pickles, between processes of one user on one host.
Stands alone: torch, pyzmq, the standard library; runs in the engine's own Python.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor
from zmq.utils.monitor import parse_monitor_message

_LONGEST_ANSWER = 2000
_GRACE_S = 2.0


class _Ended(Exception):
    """Nobody is waited for any more."""


class _Refused(Exception):
    """The engine's own words."""


class _Left(Exception):
    """The engine closed its end in the middle."""


class _Line:
    """To one device of the engine; of its own thread once it is started."""

    def __init__(self, context: zmq.Context[Any], address: str, buffer: torch.Tensor, tensors: list[Any]) -> None:
        self.sessions = 0
        self.error = ""
        self._buffer = buffer
        self._tensors = tensors
        self._socket = context.socket(zmq.REQ)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._came = self._left = 0
        self._socket.bind(address)
        self.stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.stop.bind(f"inproc://{address}")
        self._stopped.connect(f"inproc://{address}")
        self.thread = threading.Thread(target=self._run, name=address, daemon=True)

    def _run(self) -> None:
        try:
            while True:
                self._session()
        except _Ended:
            pass
        except Exception as error:  # noqa: BLE001 - told to whoever closes
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=1000)
            self._stopped.close()

    def _session(self) -> None:
        """One model of the engine. Each is given handles of its own: it counts as a reader of the memory.

        Each connects anew. What is sent while the one before closes its end would be lost with it, so that is waited for.
        """
        number = self._left + 1
        self._until(lambda: self._came >= number, idle=True)
        refused = self._ask(reduce_tensor(self._buffer))
        if refused:
            self._send(None)  # it waits for that before it ends
            raise _Refused(refused)
        refused = self._ask(self._tensors)
        if refused:
            self._send(RuntimeError("the weights are not loaded"))
            raise _Refused(refused)
        for _ in ("it lets go", "its last hook"):
            refused = self._ask(None)
            if refused:
                raise _Refused(refused)
        self.sessions += 1
        self._until(lambda: self._left >= number, idle=True)

    def _ask(self, message: Any) -> str:
        """What the engine refuses with, cut; nothing: it agreed."""
        gone = self._left
        self._send(message)
        self._until(lambda: self._readable or self._left > gone)
        if not self._readable:
            raise _Left("the engine's receiver closed its end before it answered")
        answer = self._socket.recv().decode(errors="replace").strip()
        return answer[-_LONGEST_ANSWER:]

    def _send(self, message: Any) -> None:
        out = io.BytesIO()
        ForkingPickler(out).dump(message)
        self._socket.send(out.getvalue())

    @property
    def _readable(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def _until(self, condition: Callable[[], bool], idle: bool = False) -> None:
        """Raises _Ended when it is stopped first; but for one that is `idle`, what the engine has said may be on its way."""
        poller = zmq.Poller()
        for one in (self._socket, self._events, self._stopped):
            poller.register(one, zmq.POLLIN)
        ends = None
        while not condition():
            ready = dict(poller.poll(None if ends is None else max(1e3 * (ends - time.monotonic()), 0)))
            if self._stopped in ready and ends is None:
                poller.unregister(self._stopped)
                ends = time.monotonic() + (0 if idle else _GRACE_S)
            elif not ready:
                raise _Ended
            while self._events.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                event = parse_monitor_message(self._events.recv_multipart())["event"]
                self._came += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._left += event == zmq.EVENT_DISCONNECTED


class Handles:
    """One version for one engine. `buffers`: its bytes on each device, by the device's name in the engine's request."""

    def __init__(self, buffers: dict[str, torch.Tensor], tensors: list[list[Any]]) -> None:
        """`tensors` as (name, dtype, shape, offset in the file, offset in the buffer, bytes)."""
        self._folder = Path(tempfile.mkdtemp(prefix="weights-"))  # nobody else may connect
        self._context: zmq.Context[Any] = zmq.Context()
        offered = [
            {"name": name, "dtype": getattr(torch, dtype), "shape": torch.Size(shape), "offset": start}
            for name, dtype, shape, _, start, _ in tensors
        ]
        self.addresses = {name: f"ipc://{self._folder}/{number}" for number, name in enumerate(buffers)}
        self._lines = {name: _Line(self._context, self.addresses[name], buffers[name], offered) for name in buffers}
        for line in self._lines.values():
            line.thread.start()

    def close(self, timeout_s: float) -> dict[str, Any]:
        """Ends, also what is under way. How many models of the engine took everything, by device, and what any refused with."""
        for line in self._lines.values():
            with contextlib.suppress(zmq.Again):  # it has ended by itself
                line.stop.send(b"", zmq.NOBLOCK)
        for line in self._lines.values():
            line.thread.join(timeout_s)
            line.stop.close(linger=0)
        if not any(line.thread.is_alive() for line in self._lines.values()):
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        return {
            "loaded": {name: line.sessions for name, line in self._lines.items()},
            "errors": [f"{name}: {line.error}" for name, line in self._lines.items() if line.error],
        }
