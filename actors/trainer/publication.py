"""Publishing versions beside training: one at a time, the newest wins, and training never waits for it.

step done --offer(snapshot)--> [one place] --> upload missing chunks, manifest --> head (compare-and-set)
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import aiohttp
import msgspec

from physarum.actors import states
from physarum.actors.context import Context
from physarum.bus.errors import LeaseLostError, WrongSequenceError
from physarum.bus.presence import Roster
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.configs.secrets import read_secret
from physarum.weightsync.errors import ServiceUnreachableError
from physarum.weightsync.manifest import Manifest, manifest_digest
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot

_log = logging.getLogger(__name__)

_ATTEMPT_S: Final = 60.0


class Offer(msgspec.Struct, frozen=True):
    """A version to publish: its weights on the host, and the step's metrics for the manifest."""

    version: Version
    snapshot: Snapshot
    metrics: dict[str, float]


class Publication:
    """Runs as a task of the trainer. `debt` counts versions that were made but not published."""

    def __init__(self, context: Context, model_digest: str) -> None:
        self._context = context
        self._model_digest = model_digest
        self._offer: Offer | None = None
        self._offered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._parent: str | None = None
        self.debt = 0
        self.published = 0
        self.last: Version | None = None
        self._obstacle = "no checkpoint actor has announced itself"

    @property
    def idle(self) -> bool:
        """Whether an offer would be taken up at once; otherwise a snapshot would only take memory."""
        return self._idle.is_set()

    def offer(self, offer: Offer) -> None:
        """Hands over the newest version; call only when `idle`."""
        self._offer = offer
        self._idle.clear()
        self._offered.set()

    async def drained(self, timeout_s: float) -> None:
        """Waits until the last offer is published. Raises ServiceUnreachableError when that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError as error:
            raise ServiceUnreachableError(
                f"the last version was not published within {timeout_s:g} s: {self._obstacle}; see `actorctl ps`"
            ) from error

    async def run(self) -> None:
        """Publishes what is offered, for ever. Raises LeaseLostError when a newer epoch has published."""
        heads: Register[states.Head] = Register(self._context.bus, self._context.publisher, "weights", states.Head)
        async with aiohttp.ClientSession() as session, Roster(self._context.bus, "checkpoint").open() as services:
            while True:
                await self._offered.wait()
                self._offered.clear()
                offer, self._offer = self._offer, None
                if offer is not None:
                    try:
                        await self._publish(offer, session, services, heads)
                    finally:
                        await asyncio.to_thread(offer.snapshot.close)
                self._idle.set()

    async def _publish(
        self, offer: Offer, session: aiohttp.ClientSession, services: Roster, heads: Register[states.Head]
    ) -> None:
        started = time.perf_counter()
        manifest = await self._upload(offer, session, services)
        head = states.Head(
            label=str(offer.version),
            epoch=offer.version.epoch,
            number=offer.version.number,
            manifest=manifest_digest(manifest),
            total_bytes=manifest.total_bytes,
            published_at=time.time(),
        )
        await _advance(heads, head, offer.version.model)
        self._parent, self.last = str(offer.version), offer.version
        self.published += 1
        seconds = time.perf_counter() - started
        await self._context.emit(
            "publish", {"version": str(offer.version), "seconds": seconds, "bytes": manifest.total_bytes}
        )

    async def _upload(self, offer: Offer, session: aiohttp.ClientSession, services: Roster) -> Manifest:
        token = read_secret(self._context.config.checkpoint.token_env)
        while True:
            urls = [beat.facts["url"] for beat in services.members if "url" in beat.facts]
            if not urls:
                _log.warning("%s waits for a checkpoint service to announce itself", offer.version)
                await services.wait_change(_ATTEMPT_S)
                continue
            sending = asyncio.create_task(self._send(offer, session, urls[0], token))
            try:
                manifest = await _unless_moved(sending, services, urls[0])
            except ServiceUnreachableError as error:
                self._obstacle = str(error)
                _log.warning("%s is not published yet: %s", offer.version, error)
                continue
            if manifest is not None:
                return manifest

    async def _send(self, offer: Offer, session: aiohttp.ClientSession, url: str, token: str | None) -> Manifest:
        return await upload(
            offer.snapshot,
            offer.version,
            url,
            token,
            _ATTEMPT_S,
            session=session,
            model_digest=self._model_digest,
            step=offer.version.number,
            parent=self._parent,
            metrics=offer.metrics,
        )


async def _unless_moved(sending: asyncio.Task[Manifest], services: Roster, url: str) -> Manifest | None:
    """The manifest, or None as soon as the service announces itself elsewhere (it was started anew)."""
    try:
        while not sending.done():
            change = asyncio.create_task(services.wait_change(_ATTEMPT_S))
            await asyncio.wait({sending, change}, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            if not sending.done() and all(beat.facts.get("url") != url for beat in services.members):
                _log.warning("the checkpoint service at %s is gone; looking for it again", url)
                return None
        return sending.result()
    finally:
        sending.cancel()


async def _advance(heads: Register[states.Head], head: states.Head, model: str) -> None:
    """Moves the head forward only. Raises LeaseLostError when a later epoch holds it."""
    while True:
        entry = await heads.get(states.HEAD, model)
        current = entry.value
        if current is not None and (current.epoch, current.number) > (head.epoch, head.number):
            raise LeaseLostError(
                f"{head.label} is older than the head {current.label}: another trainer took over; this one must stop"
            )
        try:
            await heads.compare_and_set(head, entry.revision, states.HEAD, model)
        except WrongSequenceError:
            continue
        return
