"""From the weights as they are to an offer for publication: the snapshot, for which alone training stands still.

Where the last version is still under way no snapshot is taken: the next one carries the changes, and debt is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch

from physarum.actors.errors import UnrecoverableError
from physarum.actors.served_model import served_quantisation
from physarum.actors.trainer.errors import SnapshotNotTaken, WeightsNotQuantised
from physarum.actors.trainer.publication import Offer, Publication
from physarum.actors.trainer.world import World
from physarum.actors.weights_area import weights_area
from physarum.bus.version import Version
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea
from physarum.weightsync.device.snapshot import DeviceSnapshot, FlatBuffer
from physarum.weightsync.errors import NoRoomError, QuantisationError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from physarum.actors.trainer.actor import TrainerActor

_log = logging.getLogger(__name__)

_FILLING: Final = "trainer-"
"""Before the names of versions that are being written into the area; of a further policy with its name between two "+", which
no name has."""
_PUBLISH_TIMEOUT_S: Final = 120.0


def broadcasts(config: RootConfig) -> bool:
    """Whether engines may take part in broadcasts."""
    return any(group.transport == "nccl" for group in config.engines.values())


class Offers:
    """The versions of one trainer, if the run has engines, or a store that they are copied to for those of others."""

    def __init__(self, actor: TrainerActor, world: World, publication: Publication) -> None:
        self._actor = actor
        self._config = actor.config
        self._world = world
        self._publication = publication
        self._area: SharedArea | None = None
        self._flat: FlatBuffer | None = None
        self._quantisation: Quantisation | None = None
        self._stalled_s = 0.0
        self._due: Version | None = None
        policy = self._config.policy
        self._filling = f"trainer+{policy}+" if policy else _FILLING

    @property
    def wanted(self) -> bool:
        return bool(self._config.engines) or self._config.checkpoint.versions is not None

    def numbers_behind(self, number: int) -> int:
        """How many numbers the newest published weights are behind."""
        last = self._publication.last
        return number - last.number if self.wanted and last is not None else 0

    def stalled_s(self) -> float:
        """For how long training stood still for snapshots since this was asked last."""
        stalled, self._stalled_s = self._stalled_s, 0.0
        return stalled

    async def begin(self) -> None:
        """Clears away what a trainer that died was writing: only the holder of the trainer's lease may call this."""
        if self.wanted:
            folder = self._actor.context.folder
            self._quantisation = await asyncio.to_thread(served_quantisation, folder, self._config)
            chunk_bytes = self._config.checkpoint.chunk_bytes
            # One rank's device holds all of the model where it is sent from there, or where there is but one rank.
            if broadcasts(self._config) or (self._world.device.type == "cuda" and self._world.config.ranks == 1):
                self._flat = FlatBuffer(chunk_bytes)
            self._area = await asyncio.to_thread(weights_area, folder, self._config)
            await asyncio.to_thread(self._area.clear_filling, self._filling)

    async def make(self, version: Version, *, final: bool = False) -> None:
        """Offers the weights, which are `version`. In ordered mode each version is waited for: the next batch is made by it;
        so is the final one."""
        if not self.wanted:
            return
        if final or self._config.trainer.ordered:
            await self._publication.drained(_PUBLISH_TIMEOUT_S)
        self._due = version
        if self._publication.last == version:
            return
        if not self._publication.idle:
            self._publication.debt += 1
            return
        await self._offer(version, final)
        if final:
            await self._publication.drained(_PUBLISH_TIMEOUT_S)
            self._publication.check_published(version)

    async def settle(self, version: Version) -> None:
        """Offers the weights, which are `version`, if the last ones that were due are not published:
        where all that comes is over age no step ever makes others, and engines would never get what brings them within it."""
        if self._publication.idle and self._due is not None and self._due != self._publication.last:
            await self.make(version)

    async def _offer(self, version: Version, final: bool) -> None:
        """Without room for a version training goes on, in sight of the user; the next one may find it."""
        limit_s, began = self._config.trainer.step_timeout_s, time.perf_counter()
        try:
            on_host = await self._actor.torch.run(lambda: self._snapshot(version), limit_s, "the snapshot")
        except (NoRoomError, SnapshotNotTaken) as error:
            if final:
                raise
            _log.error("%s is not published: %s", version, error)
            self._publication.debt += 1
            self._publication.ask_again()
            return
        except (QuantisationError, WeightsNotQuantised) as error:
            raise UnrecoverableError(f"{version} cannot be published: {error}") from error
        finally:
            self._stalled_s += time.perf_counter() - began
        self._publication.offer(Offer(version, on_host, {}, self._flat))

    def _snapshot(self, version: Version) -> Callable[[], Snapshot]:
        """On the device where there is room: the way to the host is then not the trainer's. In the torch thread."""
        name = f"{self._filling}{version}"
        taken = self._on_device()
        if taken is not None:
            return lambda: taken.on_host(self._area, name)
        snapshot = self._on_host(name)
        return lambda: snapshot

    def _on_host(self, name: str) -> Snapshot:
        """Each rank brings its share."""
        assert self._area is not None
        filling = self._area.begin(name)
        try:
            path = self._area.folder / "filling" / name
            filling.finish(self._world.snapshot(path, filling.old_bytes, self._quantisation))
            return Snapshot(HeldFile(os.dup(filling.descriptor)), filling, self._config.checkpoint.chunk_bytes)
        except BaseException:
            filling.discard()
            raise

    def _on_device(self) -> DeviceSnapshot | None:
        if self._flat is None:
            return None
        try:
            return self._flat.take(lambda: self._exported(on_device=True))
        except torch.OutOfMemoryError as error:
            _log.warning("no room on the device for a copy of the weights, training waits for the host's: %s", error)
            self._flat = None
            return None

    def _exported(self, on_device: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights in the form that engines hold, one at a time."""
        named = self._world.export(on_device)
        return named if self._quantisation is None else self._quantisation.tensors(named)
