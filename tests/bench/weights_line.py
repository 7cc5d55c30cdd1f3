"""Trainer, service and engines of B4: processes, the versions that they pass on, and what they are compared with."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import torch

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot
from tests.bench.processes import ROOT, environment
from tests.bench.weights_parts import Applied, PartSpec

TENSORS: Final = 100
DEADLINE_S: Final = 300.0
_STEP_BYTES: Final = 64
_NUDGED: Final = 100
_GIB: Final = 1 << 30


class Model:
    """Tensors of `size_bytes` in all that take no memory: views of one random block, shifted by version and name."""

    def __init__(self, size_bytes: int) -> None:
        self.elements = size_bytes // TENSORS // 2
        shifts = _STEP_BYTES * 64 * TENSORS
        self._block = torch.randint(-(1 << 15), 1 << 15, (self.elements + shifts,), dtype=torch.int16)
        self._shift = list(range(TENSORS))
        self._next = TENSORS
        self._nudged = 0

    @property
    def size_bytes(self) -> int:
        return 2 * self.elements * TENSORS

    def change(self, tensors: range) -> int:
        """Bytes that are now others."""
        for index in tensors:
            self._shift[index] = self._next = self._next % (64 * TENSORS - 1) + 1
        return 2 * self.elements * len(tensors)

    def nudge(self) -> int:
        """Every hundredth element of every tensor moves by one place, as a small step moves bfloat16; bytes that are others."""
        self._nudged = (self._nudged + 1) % _NUDGED
        self._block[self._nudged :: _NUDGED] ^= 1
        return self.size_bytes // _NUDGED

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
        async with asyncio.timeout(DEADLINE_S):
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
                snapshot, version, self.url, None, DEADLINE_S, session=self.session, model_digest="m", step=self.number
            )
        finally:
            snapshot.close()
        return str(version), ended_at

    async def round(self) -> tuple[list[float], list[Applied]]:
        """Seconds until each engine served the new version."""
        label, ended_at = await self.publish()
        applied = await asyncio.gather(*(engine.apply(label) for engine in self.engines))
        return [one.serving_at - ended_at for one in applied], applied
