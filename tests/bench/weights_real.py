"""The rows of B4 with real SGLang, on the model of the contract tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.weightsync.area import SharedArea
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging
from tests.bench.weights_line import DEADLINE_S, Line, Model, Part
from tests.bench.weights_parts import Applied, PartSpec


class RealModel(Model):
    """The tensors of a real model; each version is another multiple of them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._scale = 1.0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def change(self, tensors: range) -> int:
        self._scale *= 1.0 + 2.0**-12
        return self.size_bytes

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor * self._scale) for name, tensor in self._tensors.items())


class RealLine(Line):
    """With a receiver in this process."""

    async def applied_by(self, receiver: Receiver) -> tuple[float, Applied]:
        label, ended_at = await self.publish()
        manifest = await CheckpointClient(self.url, None, self.session).get_manifest(label)
        swap = await receiver.apply(manifest, [self.url], None)
        return swap.swapped_at - ended_at, Applied.by(receiver, swap)


@dataclass
class RealEngine:
    """One SGLang server."""

    url: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, place: Path, session: aiohttp.ClientSession) -> AsyncIterator[RealEngine]:
        from tests.engine_fixture import engine_python, tiny_model

        model = tiny_model(0)
        model.save_pretrained(place / "model")
        arguments: dict[str, Any] = {"skip-tokenizer-init": True, "max-total-tokens": 32768}
        spec = EngineSpec(
            python=engine_python(), model=place / "model", label="policy@1.0", log_file=place / "log", sglang=arguments
        )
        process = await EngineProcess.start(spec)
        try:
            await process.wait_healthy(session, DEADLINE_S)
            yield cls(process.url, dict(model.state_dict()))
        finally:
            await process.stop()

    def receiver(self, staging: Staging, session: aiohttp.ClientSession) -> Receiver:
        return Receiver(EngineControl(self.url, session), staging, session, keep_last=1)


async def real_rounds(
    place: Path, rounds: int, warm: int
) -> AsyncIterator[tuple[str, int, list[float], list[Applied], list[float]]]:
    """(Transport, bytes, seconds to serving, updates, stalls), for each transport."""
    area = SharedArea(place / "trainer")
    service = Part("service", PartSpec("service", str(place), str(area.folder)))
    try:
        url = msgspec.json.decode(await service.answer())["url"]
        async with aiohttp.ClientSession() as session, RealEngine.started(place, session) as engine:
            line = RealLine(area, url, session, [], RealModel(engine.tensors))
            for transport in ("held", "http"):
                own = area if transport == "held" else SharedArea(place / "other")
                receiver = engine.receiver(Staging(own, transport), session)
                found = []
                for _ in range(warm + rounds):
                    line.model.change(range(0))
                    found.append(await line.applied_by(receiver))
                seconds, applied = zip(*found[warm:], strict=True)
                yield transport, line.model.size_bytes, list(seconds), list(applied), line.stalls[-rounds:]
    finally:
        service.stop()
