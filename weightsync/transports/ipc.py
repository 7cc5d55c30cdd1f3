"""`ipc`: the engine copies from memory that another process of its host holds, on the same device where there is one.

The copy to the device happens before the pause; while it stands still the engine copies within the device only. One
engine's own agent (device/agent.py) holds that memory: as many bytes as change, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from physarum.weightsync.device.checks import verifiable
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.target import PauseMode, WeightTarget
from physarum.weightsync.transports.staged import stage


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
        await self.hand_over(await stage(self._agent, file, manifest, changed, self._timeout_s))

    def verifies(self, manifest: Manifest) -> bool:
        return verifiable(manifest.tensors)

    async def hand_over(self, places: Sequence[Any]) -> None:
        """Tensors that are in the agent's buffer already (see `stage`)."""
        answer = await in_thread(self._agent.call, "payload", self._timeout_s, tensors=list(places), ranks=self._ranks)
        self._payloads = answer["payloads"]

    async def load(self, label: str, mode: PauseMode) -> None:
        assert self._payloads, "prepare comes first"
        await self._target.update_from_tensors(self._payloads, label, mode)

    async def clear(self) -> None:
        self._payloads = []

    async def close(self) -> None:
        await in_thread(self._agent.close)
