"""`ipc`: the engine copies from memory that another process of its host holds, on the same device where there is one.

The copy to the device happens before the pause; while it stands still the engine copies within the device only. One
engine's own agent (device/agent.py) holds that memory: as many bytes as change, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from physarum.weightsync.device.checks import altered, verifiable
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ChunkAlteredError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.target import PauseMode, WeightTarget

ALIGNED: Final = 4096
"""Bytes: digests are of whole rows, SGLang views a piece of the buffer as the tensor's dtype, kernels read whole vectors."""


class IpcTransport:
    """`ranks`: tensor-parallel ranks of the engine, each of which maps the memory."""

    name: Final = "ipc"
    altered: Final = 0

    def __init__(self, target: WeightTarget, agent: DeviceAgent, ranks: int, timeout_s: float) -> None:
        self._target = target
        self._agent = agent
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._payloads: list[str] = []

    async def arrived(self, manifest: Manifest) -> bool:
        return False

    async def prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        assert file is not None, "nothing arrives but by files"
        places, size = _places(file, changed)
        await in_thread(self._agent.call, "stage", self._timeout_s, (file.descriptor,), tensors=places, size=size)
        if self.verifies(manifest):
            offsets = {str(place[0]): int(place[4]) for place in places}
            wrong = await altered(self._agent, changed, offsets, self._timeout_s)
            if wrong:
                raise ChunkAlteredError(f"{manifest.label}: {', '.join(wrong[:3])} are altered on the device")
        await self.hand_over(places)

    def verifies(self, manifest: Manifest) -> bool:
        return verifiable(manifest.tensors)

    async def hand_over(self, places: Sequence[Any]) -> None:
        """Tensors that are in the agent's buffer already (see `_places`)."""
        answer = await in_thread(self._agent.call, "payload", self._timeout_s, tensors=list(places), ranks=self._ranks)
        self._payloads = answer["payloads"]

    async def load(self, label: str, mode: PauseMode) -> None:
        assert self._payloads, "prepare comes first"
        await self._target.update_from_tensors(self._payloads, label, mode)

    async def clear(self) -> None:
        self._payloads = []

    async def close(self) -> None:
        await in_thread(self._agent.close)


def _places(file: HeldFile, tensors: Sequence[TensorEntry]) -> tuple[list[Any], int]:
    """Each tensor's name, dtype, shape, offset in the file, offset in the buffer, bytes; and the buffer's size."""
    places: list[Any] = []
    end = 0
    for one in tensors:
        places.append([one.name, by_name(one.dtype).name, list(one.shape), file.offset(one.name), end, one.size_bytes])
        end += -(-one.size_bytes // ALIGNED) * ALIGNED
    return places, end
