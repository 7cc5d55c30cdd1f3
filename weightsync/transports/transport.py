"""The interface of all transports: weights that were verified on this host become those of one engine.

`arrived` and `prepare` may take as long as it needs, the engine generates; `load` is all that an engine stands still for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.target import PauseMode


class Transport(Protocol):
    """One engine's."""

    @property
    def name(self) -> str:
        """What metrics call it; where it can be one or the other, what the newest version took."""

    @property
    def altered(self) -> int:
        """Tensors that it brought and that were not as their manifest says, since the start."""

    async def arrived(self, manifest: Manifest) -> bool:
        """Whether the transport itself has brought this version, and has verified it against the manifest."""

    def verifies(self, manifest: Manifest) -> bool:
        """Whether `prepare` verifies where the bytes end up; otherwise they are verified in the file before."""

    async def prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        """Makes `changed` ready to be loaded; `file` stays open until `clear`. None: the version `arrived`.

        Raises NoRoomError, DeviceError, ChunkAlteredError.
        """

    async def load(self, label: str, mode: PauseMode) -> None:
        """Loads what was prepared into the paused engine and labels it. Any failure leaves weights that nobody knows."""

    async def clear(self) -> None:
        """Gives up what was prepared: it was loaded, or never will be."""

    async def close(self) -> None:
        """Gives up everything it has, for good."""
