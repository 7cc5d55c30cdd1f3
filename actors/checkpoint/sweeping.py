"""When blobs are swept: after a durable checkpoint, at most every `blobs.sweep_every_s`, by one checkpoint actor.

    LEDGER: durable --> (lease "blobs") --> sweep every store that is announced --> not again for a while

The start of a leader counts as such an event. Its death or pause in the middle costs nothing (blob_removal.py); the lease
only spares the others the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from physarum.actors.checkpoint.roots import Roots, RootsIncompleteError
from physarum.actors.context import Context
from physarum.actors.leadership import leading
from physarum.actors.tools.errors import ArchiveAlteredError
from physarum.actors.waiting import unless_draining
from physarum.bus import ledger, log
from physarum.bus.blob_replicas import announced
from physarum.bus.blob_sweep import Sweeper
from physarum.bus.errors import BusError
from physarum.bus.ledger import DurableRecord
from physarum.bus.log import LogReader

_log = logging.getLogger(__name__)

LEASE: Final = "blobs"
_AGAIN_S: Final = 1.0


class Sweeping:
    """The sweeps of one checkpoint actor. `on_swept` is told the bytes freed by each one that freed some."""

    def __init__(self, context: Context, on_swept: Callable[[int], None]) -> None:
        self._context = context
        self._on_swept = on_swept
        self._due = asyncio.Event()

    async def run(self) -> None:
        """Until draining. No fault of the bus ends it: the service beside it goes on without."""
        while not self._context.draining.is_set():
            try:
                async with leading(self._context, LEASE) as lease:
                    if lease is not None:
                        await unless_draining(self._context, self._lead())
            except* BusError as faults:  # also a lease that was lost
                _log.warning("no sweep of blobs is led from here for now: %s", faults.exceptions[0])
                await unless_draining(self._context, asyncio.sleep(_AGAIN_S))

    async def _lead(self) -> None:
        sweeper, roots = Sweeper(self._context.config.blobs.grace_s), Roots(self._context)
        start = (await log.state(self._context.bus, "ledger")).last + 1
        self._due.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(start), name="durable checkpoints")
            while True:
                await self._due.wait()
                self._due.clear()
                await self._sweep(sweeper, roots)
                await asyncio.sleep(self._context.config.blobs.sweep_every_s)

    async def _follow(self, start: int) -> None:
        """A sweep is due after each durable checkpoint."""
        reader = LogReader(self._context.bus, "ledger", start)
        async with aclosing(reader.batches(self._context.config.bus.fetch_timeout_s)) as batches:
            async for batch in batches:
                if any(isinstance(ledger.decode_entry(entry).record, DurableRecord) for entry in batch):
                    self._due.set()

    async def _sweep(self, sweeper: Sweeper, roots: Roots) -> None:
        config = self._context.config
        try:
            async with announced(
                self._context.bus, config.blobs, config.checkpoint.token_env, self._context.host
            ) as replicas:
                freed = await sweeper.sweep(replicas.stores(), roots.mark)
        except (BusError, ArchiveAlteredError, RootsIncompleteError) as error:
            _log.error("blobs are not swept, nothing is removed: %s", error)
            return
        if freed:
            self._on_swept(freed)
