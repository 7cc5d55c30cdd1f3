"""What stays on disk: the newest checkpoints, and of the sample log what they need and what `samples.keep` asks for.

Order: archive, then trim. What leaves the log is in a durable segment before, or was not asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque

from physarum.actors.context import Context
from physarum.actors.tools.archive import Archive, archive_below
from physarum.actors.trainer.checkpoints import Checkpoints
from physarum.actors.trainer.floors import Floors
from physarum.bus import names
from physarum.bus.ledger import DurableRecord


class Retention:
    """`durables`: the checkpoints that the ledger names, oldest first."""

    def __init__(self, context: Context, checkpoints: Checkpoints, durables: list[DurableRecord]) -> None:
        self._context, self._checkpoints = context, checkpoints
        self._keep = context.config.samples.keep
        self._archive = Archive(context.folder.archive)
        self._floors_of_all = Floors(context)
        self._kept = {one.folder: one.floor for one in durables if (checkpoints.folder / one.folder).is_dir()}
        steps = self._keep if isinstance(self._keep, int) else 0
        self._floors: deque[int] = deque(maxlen=steps + 1)

    def stepped(self, floor: int) -> None:
        """A step is done; everything below `floor` was consumed by it or before it."""
        self._floors.append(floor)

    async def trim(self, newest: DurableRecord) -> None:
        """Lets go of what is not needed once `newest` is durable."""
        self._kept[newest.folder] = newest.floor
        await self._keep_newest(self._context.config.checkpoint.keep_last)

    async def release(self) -> bool:
        """Gives up the oldest checkpoint, for the samples that only it needs. False when there is only the newest."""
        if len(self._kept) <= 1:
            return False
        await self._keep_newest(len(self._kept) - 1)
        return True

    async def holds_log(self) -> bool:
        """Whether the log cannot be trimmed for the sake of these checkpoints, not for another policy's."""
        return await self._floors_of_all.is_ours(min(self._kept.values(), default=1))

    async def _keep_newest(self, count: int) -> None:
        names_kept = list(self._kept)[-count:]
        self._kept = {name: self._kept[name] for name in names_kept}
        await asyncio.to_thread(self._checkpoints.retain, names_kept)
        floor = await self._floors_of_all.agreed(min(self._kept.values()))
        if self._keep != "floor":
            await self._store(floor)
        stream = names.stream(self._context.bus.run, "samples")
        await self._context.bus.api(f"STREAM.PURGE.{stream}", {"seq": floor})

    async def _store(self, floor: int) -> None:
        await archive_below(self._context.bus, self._archive, floor)
        # After a new start nothing is removed until so many steps were seen again: a little more is kept than asked for.
        if isinstance(self._keep, int) and len(self._floors) == self._floors.maxlen:
            await asyncio.to_thread(self._archive.drop_below, self._floors[0])
