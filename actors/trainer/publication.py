"""Publishing versions beside training: one at a time, the newest wins, and training never waits for it.

step done --offer(snapshot)--> [one place] --> upload missing chunks, manifest --> head (compare-and-set)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from physarum.actors import states
from physarum.actors.called import HookFailedError, called
from physarum.actors.context import Context
from physarum.actors.waiting import done_while
from physarum.bus.errors import LeaseLostError, WrongSequenceError
from physarum.bus.presence import Roster
from physarum.bus.register import Register
from physarum.bus.version import Fork, Version
from physarum.configs.secrets import read_secret
from physarum.weightsync.errors import NoRoomError, ServiceUnreachableError
from physarum.weightsync.manifest import Manifest, manifest_digest
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from physarum.actors.trainer.broadcasting import Broadcasting
    from physarum.weightsync.device.snapshot import FlatBuffer

_log = logging.getLogger(__name__)

_ATTEMPT_S: Final = 60.0
_ROOM_AGAIN_S: Final = 5.0
"""Until a version is offered again for which there was no room: engines give up older ones meanwhile, and nobody says so."""


@dataclass(frozen=True)
class Offer:
    """A version to publish, and the step's metrics for the manifest. `on_host` blocks: it may still have to bring the weights
    there, and raises NoRoomError. `buffer`: where they are on the device, to be broadcast; nobody changes it until then."""

    version: Version
    on_host: Callable[[], Snapshot]
    metrics: dict[str, float]
    buffer: FlatBuffer | None = None


class Publication:
    """Runs as a task of the trainer. `debt` counts versions that were made but not published."""

    def __init__(
        self,
        context: Context,
        model_digest: str,
        broadcasting: Broadcasting | None = None,
        withdrawn: tuple[Fork, ...] = (),
    ) -> None:
        """`withdrawn`: what each head says of older versions (states.Head)."""
        self._context = context
        self._model_digest = model_digest
        self._broadcasting = broadcasting
        self._withdrawn = withdrawn
        self._offer: Offer | None = None
        self._offered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._parent: str | None = None
        self.debt = 0
        self.published = 0
        self.last: Version | None = None
        self._obstacle = "no checkpoint actor has announced itself"
        self._under_way: dict[str, float] = {}
        self.when_idle: Callable[[], None] = lambda: None
        """Called when another offer would be taken up and may be due; in a while after one that was passed over."""

    @property
    def under_way(self) -> str:
        """What is being done with which version, and for how long: for people."""
        now = time.monotonic()
        return ", ".join(f"{what} for {now - since:.0f} s" for what, since in self._under_way.items()) or "nothing"

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._under_way[what] = time.monotonic()
        try:
            yield
        finally:
            del self._under_way[what]

    @property
    def idle(self) -> bool:
        """Whether an offer would be taken up at once; otherwise a snapshot would only take memory."""
        return self._idle.is_set()

    def offer(self, offer: Offer) -> None:
        """Hands over the newest version; call only when `idle`."""
        self._offer = offer
        self._idle.clear()
        self._offered.set()

    def ask_again(self) -> None:
        """`when_idle` is called in a while."""
        asyncio.get_running_loop().call_later(_ROOM_AGAIN_S, lambda: self.when_idle())

    async def drained(self, timeout_s: float) -> None:
        """Waits until the last offer is published. Raises ServiceUnreachableError when that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError as error:
            raise ServiceUnreachableError(
                f"the last version was not published within {timeout_s:g} s: {self._obstacle}; see `actorctl ps`"
            ) from error

    def check_published(self, version: Version) -> None:
        """Raises NoRoomError where the host had no room for it."""
        if self.last != version:
            raise NoRoomError(f"{version}, the last one, is not published: {self._obstacle}")

    async def run(self) -> None:
        """Publishes what is offered, for ever. Raises LeaseLostError when a newer epoch has published."""
        heads: Register[states.Head] = Register(self._context.bus, self._context.publisher, "weights", states.Head)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            services = await stack.enter_async_context(Roster(self._context.bus, "checkpoint").open())
            broadcast = await self._broadcasts(stack)
            while True:
                await self._offered.wait()
                self._offered.clear()
                offer, self._offer = self._offer, None
                assert offer is not None
                sending = asyncio.create_task(broadcast(offer), name=f"broadcast {offer.version}")
                try:
                    taken = await self._take_up(offer, session, services, heads)
                    await sending
                finally:
                    sending.cancel()
                self._idle.set()
                if taken:
                    self.when_idle()
                else:
                    self.ask_again()

    async def _broadcasts(self, stack: AsyncExitStack) -> Callable[[Offer], Coroutine[None, None, None]]:
        """What sends an offer to the engines that take part; nothing where none can."""
        broadcasting = self._broadcasting
        if broadcasting is None:
            return _nobody
        engines = await stack.enter_async_context(Roster(self._context.bus, "engine").open())
        stack.push_async_callback(broadcasting.close)

        async def broadcast(offer: Offer) -> None:
            if offer.buffer is not None:
                with self._doing(f"broadcast of {offer.version}"):
                    await broadcasting.send(offer.version, offer.buffer, engines)

        return broadcast

    async def _take_up(
        self, offer: Offer, session: aiohttp.ClientSession, services: Roster, heads: Register[states.Head]
    ) -> bool:
        """Whether it is published. Without room on the host it is passed over, in sight of the user."""
        started = time.perf_counter()
        try:
            with self._doing(f"copy of {offer.version} to the host"):
                snapshot = await in_thread(offer.on_host)
        except NoRoomError as error:
            _log.error("%s is not published: %s", offer.version, error)
            self._obstacle = str(error)
            self.debt += 1
            return False
        try:
            await self._publish(offer, snapshot, started, session, services, heads)
        finally:
            await asyncio.to_thread(snapshot.close)
        return True

    async def _publish(
        self,
        offer: Offer,
        snapshot: Snapshot,
        started: float,
        session: aiohttp.ClientSession,
        services: Roster,
        heads: Register[states.Head],
    ) -> None:
        with self._doing(f"{offer.version} to the checkpoint service"):
            manifest = await self._upload(offer, snapshot, session, services)
        head = states.Head(
            label=str(offer.version),
            epoch=offer.version.epoch,
            number=offer.version.number,
            manifest=manifest_digest(manifest),
            total_bytes=manifest.total_bytes,
            published_at=time.time(),
            withdrawn=self._withdrawn,
        )
        await _advance(heads, head, offer.version.model)
        self._parent, self.last = str(offer.version), offer.version
        self.published += 1
        seconds = time.perf_counter() - started
        await self._context.emit(
            "publish", {"version": str(offer.version), "seconds": seconds, "bytes": manifest.total_bytes}
        )
        await self._tell(manifest)

    async def _tell(self, manifest: Manifest) -> None:
        """The version is published whatever the user's function makes of it."""
        call = self._context.config.checkpoint.after_publish
        if call is None:
            return
        try:
            with self._doing(f"checkpoint.after_publish for {manifest.label}"):
                await called(call, "checkpoint.after_publish", manifest)
        except HookFailedError as error:
            _log.error("%s is published, but: %s", manifest.label, error)

    async def _upload(
        self, offer: Offer, snapshot: Snapshot, session: aiohttp.ClientSession, services: Roster
    ) -> Manifest:
        token = read_secret(self._context.config.checkpoint.token_env)
        while True:
            urls = [beat.facts["url"] for beat in services.members if "url" in beat.facts]
            if not urls:
                _log.warning("%s waits for a checkpoint service to announce itself", offer.version)
                await services.wait_change(_ATTEMPT_S)
                continue
            sending = asyncio.create_task(self._send(offer, snapshot, session, urls[0], token))
            try:
                manifest = await _unless_moved(sending, services, urls[0])
            except ServiceUnreachableError as error:
                self._obstacle = str(error)
                _log.warning("%s is not published yet: %s", offer.version, error)
                continue
            if manifest is not None:
                return manifest

    async def _send(
        self, offer: Offer, snapshot: Snapshot, session: aiohttp.ClientSession, url: str, token: str | None
    ) -> Manifest:
        return await upload(
            snapshot,
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


async def _nobody(offer: Offer) -> None:
    """No engine of the run takes part in broadcasts."""


async def _unless_moved(sending: asyncio.Task[Manifest], services: Roster, url: str) -> Manifest | None:
    """The manifest, or None as soon as the service announces itself elsewhere (it was started anew)."""
    try:
        if not await done_while(
            sending, services, lambda: any(beat.facts.get("url") == url for beat in services.members), _ATTEMPT_S
        ):
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
