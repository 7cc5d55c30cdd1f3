"""`disk`: the engine reads a folder of safetensors, in the host's shared memory or on a file system that both see.

Every engine can do it, also one that others run, on any vendor's hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.staging import Staging
from physarum.weightsync.target import PauseMode, WeightTarget


class DiskTransport:
    name: Final = "disk"
    altered: Final = 0

    def __init__(self, target: WeightTarget, staging: Staging) -> None:
        self._target = target
        self._staging = staging
        self._folder: Path | None = None

    async def arrived(self, manifest: Manifest) -> bool:
        return False

    def verifies(self, manifest: Manifest) -> bool:
        return False

    async def prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        assert file is not None, "nothing arrives but by files"
        self._folder = await in_thread(self._staging.prepare, file, manifest, changed)

    async def load(self, label: str, mode: PauseMode) -> None:
        assert self._folder is not None, "prepare comes first"
        await self._target.update_from_disk(self._folder, label, mode)

    async def clear(self) -> None:
        self._folder = None
        await in_thread(self._staging.clear)

    async def close(self) -> None:
        await self.clear()
