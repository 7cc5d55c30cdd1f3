"""Holds one version's weights on an engine's device, outside the engine. Runs in the engine's own Python.

    python agent.py DESCRIPTOR      a socket to its owner (wire.py); one answer to each message, in order

Why a process of its own: CUDA memory can be handed to an engine only by a process that has a CUDA context, and a
broadcast that hangs or a device that fails must take neither the actor with it nor the engine. It ends with its owner.
Stands alone: torch, the standard library, and the one class of SGLang that its own loader asks for.

| message | answer |
|---|---|
| hello | device, torch's version, versions of optional packages |
| stage: tensors as (name, dtype, shape, offset in the file, offset here, bytes), size; a file's descriptor | seconds |
| payload: the same tensors, how many ranks | one serialised bucket for each tensor-parallel rank |
| offer: the same | sockets at which the engine takes them, by device (handles.py) |
| withdraw | which of the engine's devices took them, and what any refused with |
| digests: pieces as (offset, bytes) | the multilinear digest of each |
| open, adopt, send, receive | broadcasting.py |
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import importlib.metadata
import importlib.util
import io
import mmap
import os
import platform
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

sys.path.append(str(Path(__file__).parent))
import multilinear
import wire
from broadcasting import Group
from pinned import PinnedFiles

_PR_SET_PDEATHSIG = 1
_RING_BYTES = 64 << 20
_LEFTOVER_S = 1.0
_BUCKET = "sglang.srt.weight_sync.tensor_bucket"


class Agent:
    """One flat buffer on the device, used for one version after another. An engine that answered has copied from it:
    torch waits for the engine's stream before it lets go of memory that came from another process."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._ring: list[torch.Tensor] = []
        self._group = Group(self.device)
        self._files = PinnedFiles()
        self._handles: Any = None
        if self.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")

    def hello(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        torch.zeros(1, device=self.device)
        packages = {name: _version(name) for name in ("checkpoint-engine", "pyzmq")}
        return {"device": str(self.device), "torch": torch.__version__, "packages": packages}

    def stage(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """From a file of this host to the device. Its owner holds the file and has verified it."""
        started = time.perf_counter()
        self.make_room(message["size"])
        pinned = self._files.memory(descriptors[0]) if self.device.type == "cuda" else None
        if pinned is not None:
            self._fill(pinned, message["tensors"], lambda source, target: target.copy_(source, non_blocking=True))
        else:
            with mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ) as memory:
                self._fill(torch.frombuffer(memory, dtype=torch.uint8), message["tensors"], self._copy)
        self.synchronize()
        return {"seconds": time.perf_counter() - started, "pinned": pinned is not None}

    def _fill(self, file: torch.Tensor, tensors: list[list[Any]], copy: Callable[..., object]) -> None:
        """What is behind a tensor up to the next row is zeroed: digests read whole rows."""
        for source, target, size in _runs(tensors):
            copy(file[source : source + size], self.buffer[target : target + size])
        for *_, target, size in tensors:
            if size % multilinear.ROW_BYTES:
                self.buffer[target + size : target + size + -size % multilinear.ROW_BYTES].zero_()

    def payload(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Serialised once for each rank: each of them counts as a reader of the memory."""
        bucket = _bucket_module()
        metadata, last = [], 0
        for name, dtype, shape, _, start, size in message["tensors"]:
            metadata.append(
                bucket.FlattenedTensorMetadata(
                    name=name,
                    shape=torch.Size(shape),
                    dtype=getattr(torch, dtype),
                    start_idx=start,
                    end_idx=start + size,
                    numel=size,
                )
            )
            last = max(last, start + size)
        content = {"flattened_tensor": self.buffer[:last], "metadata": metadata}
        return {"payloads": [_serialised(content) for _ in range(message["ranks"])]}

    def offer(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Every rank takes the whole from its own device: the first from the buffer, others from copies of it."""
        from handles import Handles  # with pyzmq, which only an engine that takes weights in this way has

        if self._handles is not None:
            self._handles.close(_LEFTOVER_S)
        self._handles = Handles(self._replicas(message["ranks"], message["tensors"]), message["tensors"])
        return {"handles": self._handles.addresses}

    def withdraw(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        handles, self._handles = self._handles, None
        return handles.close(message["within_s"])

    def _replicas(self, ranks: int, tensors: list[list[Any]]) -> dict[str, torch.Tensor]:
        if self.device.type == "cpu":
            return {f"GPU-{platform.machine()}": self.buffer}  # as SGLang names it
        pieces = [(start, size) for *_, start, size in tensors]
        expected, replicas = multilinear.digests(self.buffer, pieces), {}
        for rank in range(ranks):
            replica = self.buffer.to(f"cuda:{rank}")
            if rank and multilinear.digests(replica, pieces) != expected:
                raise RuntimeError(f"what was copied to device {rank} is not what is on device 0")
            replicas[f"GPU-{torch.cuda.get_device_properties(rank).uuid}"] = replica
        return replicas

    def digests(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return {"digests": multilinear.digests(self.buffer, [tuple(piece) for piece in message["pieces"]])}

    def open(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return {"port": self._group.open(message["host"])}

    def adopt(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """The owner's own buffer: what is sent is read there."""
        self.buffer = ForkingPickler.loads(base64.b64decode(message["buffer"]))
        return {"size": self.buffer.numel()}

    def send(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return self._group.send(self.buffer, **message["arguments"])

    def receive(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        def room(size: int) -> torch.Tensor:
            self.make_room(size)
            return self.buffer[:size]

        return self._group.receive(room, **message["arguments"])

    def make_room(self, size: int) -> None:
        if self.buffer.numel() >= size:
            return
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.buffer = buffer if self.device.type == "cuda" else buffer.share_memory_()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Through two pieces of pinned memory: one is filled while the other travels."""
        if self.device.type == "cpu":
            target.copy_(source)
            return
        if not self._ring:
            self._ring = [torch.empty(_RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._done = [torch.cuda.Event(), torch.cuda.Event()]
        for number, start in enumerate(range(0, source.numel(), _RING_BYTES)):
            piece, done = self._ring[number % 2], self._done[number % 2]
            count = min(_RING_BYTES, source.numel() - start)
            done.synchronize()
            piece[:count].copy_(source[start : start + count])
            target[start : start + count].copy_(piece[:count], non_blocking=True)
            done.record()


def _runs(tensors: list[list[Any]]) -> list[tuple[int, int, int]]:
    """(offset in the file, offset here, bytes), what lies side by side on both sides joined."""
    runs: list[tuple[int, int, int]] = []
    for _, _, _, source, target, size in tensors:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + size)
        else:
            runs.append((source, target, size))
    return [run for run in runs if run[2]]


def _version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _serialised(content: dict[str, Any]) -> str:
    """As SGLang's MultiprocessingSerializer: handles of the memory, not the bytes; for an engine of this host only."""
    out = io.BytesIO()
    ForkingPickler(out).dump(content)
    return base64.b64encode(out.getvalue()).decode()


def _bucket_module() -> Any:
    """Only this file of SGLang, under the name that its loader checks: the packages round it are empty here, for what they
    import takes seconds and memory."""
    if _BUCKET not in sys.modules:
        package = importlib.util.find_spec("sglang")
        if package is None or not package.submodule_search_locations:
            raise ModuleNotFoundError(f"{sys.executable} has no sglang; the agent needs the engine's own Python")
        file = Path(package.submodule_search_locations[0], *_BUCKET.split(".")[1:]).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(_BUCKET, file)
        assert spec is not None and spec.loader is not None
        parents = _BUCKET.split(".")[:-1]
        for depth in range(len(parents)):
            name = ".".join(parents[: depth + 1])
            sys.modules.setdefault(name, types.ModuleType(name))
        module = importlib.util.module_from_spec(spec)
        sys.modules[_BUCKET] = module
        spec.loader.exec_module(module)
    return sys.modules[_BUCKET]


def main() -> None:
    owner = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        return
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # its owner asks, before it gives up
    connection = socket.socket(fileno=int(sys.argv[1]))
    agent = Agent()
    while True:
        try:
            message, descriptors = wire.receive(connection)
        except EOFError:
            return
        try:
            answer = getattr(agent, message["call"])(message, descriptors)
        except Exception as error:  # noqa: BLE001 - the owner raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        wire.send(connection, answer)


if __name__ == "__main__":
    main()
