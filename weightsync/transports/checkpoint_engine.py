"""`checkpoint_engine`: the engine takes a version as from checkpoint-engine's parameter server, at `/update_weights_from_ipc`.

As by `ipc` it copies from memory that its agent holds on its own device, verified; the engine's own receiver speaks to the
agent (device/handles.py). For engines that are started to wait for their first weights.
While it loads the engine waits for the agent without a deadline of its own: an agent that dies then costs the update's deadline
and the engine, which is quarantined.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from physarum.weightsync.device.checks import verifiable
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.target import PauseMode, WeightTarget
from physarum.weightsync.transports.staged import stage

_log = logging.getLogger(__name__)

_WITHDRAWN_S: Final = 5.0
"""For the agent to end what it offers: the engine has answered by then, or never will."""


class CheckpointEngineTransport:
    """`ranks`: of the engine, each on a device of its own that the agent sees too."""

    name: Final = "checkpoint_engine"
    altered: Final = 0

    def __init__(self, target: WeightTarget, agent: DeviceAgent, ranks: int, timeout_s: float) -> None:
        self._target = target
        self._agent = agent
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._handles: dict[str, str] = {}

    async def arrived(self, manifest: Manifest) -> bool:
        return False

    def verifies(self, manifest: Manifest) -> bool:
        return verifiable(manifest.tensors)

    async def prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        assert file is not None, "nothing arrives but by files"
        places = await stage(self._agent, file, manifest, changed, self._timeout_s)
        answer = await in_thread(self._agent.call, "offer", self._timeout_s, tensors=places, ranks=self._ranks)
        self._handles = answer["handles"]

    async def load(self, label: str, mode: PauseMode) -> None:
        assert self._handles, "prepare comes first"
        try:
            await self._target.update_from_handles(self._handles, label, mode)
        except Exception as error:
            try:
                _, errors = await self._withdraw()
            except DeviceError as second:
                errors = [str(second)]
            raise DeviceError(f"{error}{'; the agent saw: ' if errors else ''}{'; '.join(errors)}") from error
        loaded, errors = await self._withdraw()
        problems = [*errors, *(f"{device} never took it" for device, count in loaded.items() if not count)]
        if problems:
            raise DeviceError(f"the engine says that it has {label}, but {'; '.join(problems)}")

    async def clear(self) -> None:
        """An agent that ended takes its offer with it."""
        if self._handles:
            try:
                await self._withdraw()
            except DeviceError as error:
                _log.warning("what was offered to the engine is gone with its agent: %s", error)

    async def close(self) -> None:
        self._handles = {}
        await in_thread(self._agent.close)

    async def _withdraw(self) -> tuple[dict[str, int], list[str]]:
        """How many models of the engine took everything, by device, and what any refused with."""
        self._handles = {}
        answer = await in_thread(self._agent.call, "withdraw", 2 * _WITHDRAWN_S, within_s=_WITHDRAWN_S)
        return answer["loaded"], answer["errors"]
