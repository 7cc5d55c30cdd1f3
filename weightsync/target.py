"""What a receiver needs of an engine. EngineControl of the engine role fulfils it; tests have a smaller one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

PauseMode = Literal["retract", "in_place"]


class WeightTarget(Protocol):
    """Something that generates, can be paused, and loads weights from a folder. Every call has its own deadline."""

    async def check_pause_mode(self, mode: PauseMode) -> None:
        """Raises where an update in this mode would let old KV serve new tokens. Touches nothing."""

    async def pause(self, mode: PauseMode) -> None:
        """Stops between two tokens, aborts nothing. `retract`: KV is given up; `in_place`: KV is kept."""

    async def update_from_disk(self, folder: Path, label: str, mode: PauseMode) -> None:
        """Loads the safetensors in `folder` and labels them; `mode` is the one it was paused in."""

    async def update_from_tensors(self, payloads: Sequence[str], label: str, mode: PauseMode) -> None:
        """Loads the tensors behind one serialised bucket for each tensor-parallel rank, as `update_from_disk`."""

    async def update_from_handles(self, handles: Mapping[str, str], label: str, mode: PauseMode) -> None:
        """Loads the tensors that are offered at ZeroMQ addresses, by the name of each of its devices, as `update_from_disk`."""

    async def live_label(self) -> str:
        """The label of the weights that the next token will be made with."""

    async def continue_generation(self) -> None:
        """Undoes `pause`."""
