"""B4, weights: from the end of an optimizer step to engines that serve the new version.

    held   engines on the trainer's host: the snapshot is the version; each engine verifies it and copies what changed
    http   each engine on a host of its own (an area of its own), over loopback

Trainer, service and every engine are processes. Engines copy into memory and generate nothing (`stub`); one row per
transport is real SGLang on a small model. limit_s is the sum of the passes that must be made, at the rates measured in this
run: snapshot, hash of all, transfer, verify and apply of what changed. Rounds before memory is used again are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import aiohttp
import msgspec
import torch

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot
from tests.bench import host
from tests.bench.processes import ROOT, environment
from tests.bench.weights_parts import Applied, PartSpec

_TENSORS: Final = 100
_STEP_BYTES: Final = 64
_GIB: Final = 1 << 30
_WARM: Final = 2
_DEADLINE_S: Final = 300.0
_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Load:
    """`rounds` full versions and as many deltas of 1 %, after two that are not counted."""

    transport: str
    size_bytes: int
    engines: int
    rounds: int = 5


LOADS: Final = {
    "smoke": [Load("held", 100 << 20, 1, 3), Load("http", 100 << 20, 2, 3)],
    "full": [
        *(Load("held", 500_000_000, engines) for engines in (1, 2, 4, 8)),
        *(Load("http", 500_000_000, engines) for engines in (1, 2, 4, 8)),
        *(Load("held", 1_500_000_000, engines) for engines in (1, 4)),
        Load("http", 1_500_000_000, 1),
        Load("held", 7_000_000_000, 1, 3),
    ],
}


class Model:
    """Tensors of `size_bytes` in all that take no memory: views of one random block, shifted by version and name."""

    def __init__(self, size_bytes: int) -> None:
        self.elements = size_bytes // _TENSORS // 2
        shifts = _STEP_BYTES * 64 * _TENSORS
        self._block = torch.randint(-(1 << 15), 1 << 15, (self.elements + shifts,), dtype=torch.int16)
        self._shift = list(range(_TENSORS))
        self._next = _TENSORS

    @property
    def size_bytes(self) -> int:
        return 2 * self.elements * _TENSORS

    def change(self, tensors: range) -> int:
        """Bytes that are now others."""
        for index in tensors:
            self._shift[index] = self._next = self._next % (64 * _TENSORS - 1) + 1
        return 2 * self.elements * len(tensors)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, shift in enumerate(self._shift):
            start = shift * _STEP_BYTES
            yield f"layers.{index}.weight", self._block[start : start + self.elements]


class Part:
    """A child process that answers lines with lines."""

    def __init__(self, kind: str, spec: PartSpec) -> None:
        path = Path(spec.folder) / f"{spec.name}.json"
        path.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "tests.bench.weights_parts", kind, str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
        )

    async def answer(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(_DEADLINE_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        if not line:
            raise RuntimeError(f"a process of B4 ended with {self.process.wait()}")
        return line

    async def apply(self, label: str) -> Applied:
        assert self.process.stdin is not None
        self.process.stdin.write(label + "\n")
        self.process.stdin.flush()
        return msgspec.json.decode(await self.answer(), type=Applied)

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass
class Line:
    """Trainer, service and engines of one load."""

    area: SharedArea
    url: str
    session: aiohttp.ClientSession
    engines: list[Part]
    model: Model
    number: int = 0
    stalls: list[float] = field(default_factory=list)

    async def publish(self) -> tuple[str, float]:
        """(Label, Unix time at which the step had ended)."""
        self.number += 1
        version = Version("policy", 1, self.number)
        ended_at, began = time.time(), time.perf_counter()
        snapshot = await asyncio.to_thread(Snapshot.take, self.model.export(), 4 << 20, self.area, f"trainer-{version}")
        self.stalls.append(time.perf_counter() - began)
        try:
            await upload(
                snapshot, version, self.url, None, _DEADLINE_S, session=self.session, model_digest="m", step=self.number
            )
        finally:
            snapshot.close()
        return str(version), ended_at

    async def round(self) -> tuple[list[float], list[Applied]]:
        """Seconds until each engine served the new version."""
        label, ended_at = await self.publish()
        applied = await asyncio.gather(*(engine.apply(label) for engine in self.engines))
        return [one.serving_at - ended_at for one in applied], applied


async def measure(size: str) -> dict[str, Any]:
    """The fields of B4."""
    rates = {"memcpy_gib_s": round(host.memcpy_gib_s(), 2), "hash_gib_s": round(hash_gib_s(), 2)}
    rates["loopback_gib_s"] = round(await loopback_gib_s(), 2)
    rows: list[dict[str, Any]] = []
    joins: dict[str, Any] = {}
    for load in LOADS[size]:
        found, joined = await _measured(load, rates, joins=load.transport not in joins)
        rows += found
        if joined:
            joins[load.transport] = joined
    return {
        "rows": rows,
        **rates,
        "late_join_s": {name: joined["late_join_s"] for name, joined in joins.items()},
        "one_transfer_s": {name: joined["one_transfer_s"] for name, joined in joins.items()},
        "trainer_stall_s": {f"{row['transport']} {row['bytes']}": row["trainer_stall_s"] for row in rows},
        "disk_reload_s": await asyncio.to_thread(disk_reload_s, LOADS[size][0].size_bytes),
        "checksum_failures": sum(row["checksum_failures"] for row in rows),
    }


async def _measured(
    load: Load, rates: dict[str, float], joins: bool
) -> tuple[list[dict[str, Any]], dict[str, float] | None]:
    """The rows of a load and, where `joins`, what an engine that comes late needs."""
    async with _line(load) as line:
        rows = []
        for mode, count in (("full", _TENSORS), ("delta", _TENSORS // 100)):
            changed = line.model.change(range(_TENSORS))
            for _ in range(_WARM if mode == "full" else 0):
                await line.round()
                line.model.change(range(_TENSORS))
            await line.round()
            seconds, applied, stalls = [], [], len(line.stalls)
            for _ in range(load.rounds):
                changed = line.model.change(range(count))
                times, swaps = await line.round()
                seconds += times
                applied += swaps
            rows.append(_row(load, mode, line.model.size_bytes, changed, seconds, applied, line.stalls[stalls:], rates))
        return rows, await _late_join(load, line) if joins else None


def _row(
    load: Load,
    mode: str,
    total: int,
    changed: int,
    seconds: list[float],
    applied: list[Applied],
    stalls: list[float],
    rates: dict[str, float],
) -> dict[str, Any]:
    pauses = [one.pause_s for one in applied]
    copy, hashed, sent = (rates[name] * _GIB for name in ("memcpy_gib_s", "hash_gib_s", "loopback_gib_s"))
    limit_s = total / copy + total / hashed + changed / hashed + changed / copy
    limit_s += changed / sent if load.transport == "http" else 0.0
    return {
        "transport": f"{load.transport}, stub",
        "bytes": total,
        "engines": load.engines,
        "mode": mode,
        "publish_to_serving_p50_s": round(_at(seconds, 50), 4),
        "publish_to_serving_p99_s": round(_at(seconds, 99), 4),
        "pause_p50_s": round(_at(pauses, 50), 4),
        "pause_p99_s": round(_at(pauses, 99), 4),
        "bytes_moved": sum(one.bytes_fetched for one in applied) // len(applied),
        "bytes_changed": changed,
        "bytes_applied": applied[-1].bytes_applied,
        "limit_s": round(limit_s, 4),
        "of_limit": round(limit_s / _at(seconds, 50), 3),
        "trainer_stall_s": round(_at(stalls, 50), 4),
        "checksum_failures": max(one.checksum_failures for one in applied),
    }


async def _late_join(load: Load, line: Line) -> dict[str, float]:
    """A further engine comes; what one of the engines needs for a whole version is what it is compared with."""
    line.model.change(range(_TENSORS))
    _, applied = await line.round()
    label = f"policy@1.{line.number}"
    place = Path(line.area.folder).parent
    spec = PartSpec("late", str(place), str(line.area.folder if load.transport == "held" else place / "late"), line.url)
    late = Part("engine", spec)
    try:
        await late.answer()
        joined = await late.apply(label)
    finally:
        late.stop()
    return {
        "late_join_s": round(joined.fetch_s + joined.pause_s, 4),
        "one_transfer_s": round(min(one.fetch_s + one.pause_s for one in applied), 4),
    }


@contextlib.asynccontextmanager
async def _line(load: Load) -> AsyncIterator[Line]:
    with contextlib.ExitStack() as parts:
        place = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="b4-", dir=_MEMORY)))
        area = SharedArea(place / "trainer")
        service = Part("service", PartSpec("service", str(place), str(area.folder)))
        parts.callback(service.stop)
        url = msgspec.json.decode(await service.answer())["url"]
        engines = []
        for number in range(load.engines):
            own = area.folder if load.transport == "held" else place / f"host-{number}"
            engines.append(Part("engine", PartSpec(f"engine-{number}", str(place), str(own), url)))
            parts.callback(engines[-1].stop)
        for engine in engines:
            await engine.answer()
        async with aiohttp.ClientSession() as session:
            yield Line(area, url, session, engines, Model(load.size_bytes))


def hash_gib_s(size_bytes: int = 256 << 20) -> float:
    """xxh3-128 over memory that no cache holds, in chunks, the best of some passes."""
    from physarum.weightsync.digest import digest_of

    data = memoryview(bytearray(size_bytes))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for start in range(0, size_bytes, 4 << 20):
            digest_of(data[start : start + (4 << 20)])
        best = min(best, time.perf_counter() - began)
    return size_bytes / best / _GIB


async def loopback_gib_s(size_bytes: int = 1 << 30) -> float:
    """One plain TCP connection, received into memory that is there."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        block = memoryview(bytearray(4 << 20))
        for _ in range(size_bytes // len(block)):
            writer.write(block)
            await writer.drain()
        writer.close()

    import socket

    server = await asyncio.start_server(send, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def receive() -> float:
        target, count = memoryview(bytearray(4 << 20)), 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            began = time.perf_counter()
            while (got := connection.recv_into(target)) > 0:
                count += got
        return count / (time.perf_counter() - began) / _GIB

    async with server:
        return await asyncio.to_thread(receive)


def disk_reload_s(size_bytes: int) -> float:
    """The plain way: write a checkpoint with safetensors, load it from disk into an engine's memory."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = Model(size_bytes)
    memory = {name: torch.ones_like(tensor) for name, tensor in model.export()}
    with tempfile.TemporaryDirectory(prefix="b4-disk-") as place:
        path = f"{place}/model.safetensors"
        began = time.perf_counter()
        save_file({name: tensor.contiguous().clone() for name, tensor in model.export()}, path)
        with safe_open(path, "pt") as file:
            for name, tensor in memory.items():
                tensor.copy_(file.get_tensor(name))
        return round(time.perf_counter() - began, 4)


def _at(values: list[float], percent: int) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
