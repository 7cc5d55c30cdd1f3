"""Copying checkpoints to an object store beside training: one at a time, the newest wins, and training never waits for it.

    durable --offer--> [one place] --> second names of its files --> a process sends them, digests last --> old ones go

A failure is logged and counted; the next checkpoint is the next try.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from physarum.actors.mirror.asking import ask, mirror_url
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import Copied, Copy, Named, Retain, Retained
from physarum.actors.trainer.recovery import Recovery
from physarum.bus.ledger import DurableRecord

if TYPE_CHECKING:
    from physarum.actors.trainer.actor import TrainerActor

_log = logging.getLogger(__name__)

_DRAIN_SHARE: Final = 0.5
"""Of `supervisor.drain_timeout_s`: the rest is for the trainer's own end."""


class Mirroring:
    """Runs as a task of the trainer; does nothing without `checkpoint.mirror`. The actor's numbers say `mirrored`, the newest
    step there, and `mirror_failures`."""

    def __init__(self, actor: TrainerActor, recovery: Recovery) -> None:
        self._context, self._numbers = actor.context, actor.numbers
        self._checkpoints, self._config = actor.checkpoints, actor.config
        self._url = mirror_url(actor.config)
        self._candidates = {one.folder: Named.of(one) for one in recovery.durables}
        self._known = {Named.of(one): None for one in recovery.named}
        self._offer: DurableRecord | None = None
        self._offered, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._last = recovery.durable

    def offer(self, durable: DurableRecord) -> None:
        """Hands over the newest checkpoint; it takes the place of one that still waits."""
        if self._url is None:
            return
        self._candidates.pop(durable.folder, None)  # written again: the newest now
        self._candidates[durable.folder] = Named.of(durable)
        self._known[Named.of(durable)] = None
        self._offer = durable
        self._idle.clear()
        self._offered.set()

    async def run(self) -> None:
        """Copies what is offered, for ever; first what the trainer began from, should it not be there."""
        if self._url is None:
            return
        await asyncio.to_thread(self._checkpoints.clear_leftovers)
        if self._last is not None and self._offer is None:
            self.offer(self._last)
        while True:
            await self._offered.wait()
            self._offered.clear()
            durable, self._offer = self._offer, None
            if durable is not None:
                await self._take_up(self._url, durable)
            if self._offer is None:
                self._idle.set()

    async def settled(self) -> None:
        """Waits until the last offer is there or has failed; of a run that drains, for no longer than a drain can wait."""
        waits = {asyncio.create_task(one.wait()) for one in (self._idle, self._context.draining)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        try:
            async with asyncio.timeout(self._config.supervisor.drain_timeout_s * _DRAIN_SHARE):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("the run drains before its last checkpoint is in %s; the next start copies it", self._url)

    async def _take_up(self, url: str, durable: DurableRecord) -> None:
        try:
            folder = await asyncio.to_thread(self._checkpoints.linked, durable.folder)
        except OSError as error:
            if self._offer is None:  # else it was let go, and a newer one waits
                self._failed(url, durable, error)
            return
        try:
            await self._copy(url, durable, folder)
        except (MirrorError, MirrorUnfitError) as error:
            self._failed(url, durable, error)
        else:
            await self._let_go(url)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _copy(self, url: str, durable: DurableRecord, folder: Path) -> None:
        began_s = time.perf_counter()
        request = Copy(url=url, folder=str(folder), checkpoint=Named.of(durable))
        copied = await ask(request, Copied, self._config.checkpoint.mirror_timeout_s)
        seconds = time.perf_counter() - began_s
        self._numbers["mirrored"] = durable.number
        _log.info("checkpoint %s is in %s: %d bytes in %.1f s", durable.folder, url, copied.size_bytes, seconds)
        facts = {"checkpoint": durable.folder, "seconds": seconds, "bytes": copied.size_bytes}
        await self._context.emit("mirror", facts)

    async def _let_go(self, url: str) -> None:
        """Old ones that could not be let go are, with the next checkpoint."""
        settings = self._config.checkpoint
        request = Retain(
            url=url,
            candidates=list(self._candidates.values()),
            known=list(self._known),
            keep=settings.mirror_keep or settings.keep_last,
        )
        try:
            await ask(request, Retained, settings.mirror_timeout_s)
        except (MirrorError, MirrorUnfitError) as error:
            _log.error("old checkpoints in %s could not be let go (failure %d): %s", url, self._failure(), error)

    def _failed(self, url: str, durable: DurableRecord, error: Exception) -> None:
        _log.error(
            "checkpoint %s is not in %s (failure %d), the next one is the next try: %s",
            *(durable.folder, url, self._failure(), error),
        )

    def _failure(self) -> int:
        self._numbers["mirror_failures"] = self._numbers.get("mirror_failures", 0) + 1
        return int(self._numbers["mirror_failures"])
