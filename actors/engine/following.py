"""An engine that follows the head: each version is fetched, verified and applied, then announced.

    head --> fetch, verify, turn, pause, apply, label, go on --> ready <-- next head
      |  not reached: again when the head or the holders change      `--> quarantined: the server is started anew

Invariant: state "ready" is announced only with the label of weights that were verified and confirmed by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from physarum.actors import states
from physarum.actors.called import HookFailedError, called
from physarum.actors.carrying import carrier_of
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.delivery import transport_for
from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.handing_over import hand_over
from physarum.actors.engine.listening import listen
from physarum.actors.engine.load import UNREACHABLE
from physarum.actors.engine.origin import Origin
from physarum.actors.engine.readiness import until_healthy
from physarum.actors.engine.relaying import Relay
from physarum.actors.engine.standing import Standing
from physarum.actors.engine.trials import Trials, Wanted
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.actors.policy_engines import HANDING_OVER, head_key
from physarum.actors.served_model import served_model, served_quantisation
from physarum.actors.weights_area import weights_area
from physarum.bus.errors import BusError
from physarum.bus.presence import Roster
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.weightsync.errors import (
    BucketError,
    BucketUnfitError,
    ChunkAlteredError,
    ChunkMissingError,
    DeviceError,
    EngineQuarantineError,
    ManifestError,
    NoRoomError,
    ServiceRefusedError,
    ServiceUnreachableError,
    StaleVersionError,
    TransportUnfitError,
    UpdateRefusedError,
    VersionRefusedError,
)
from physarum.weightsync.layout import forms_in
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.receiver import Receiver, SwapRecord
from physarum.weightsync.staging import Staging
from physarum.weightsync.transports.nccl import NcclTransport

if TYPE_CHECKING:
    from physarum.actors.engine.actor import EngineActor

_log = logging.getLogger(__name__)

_TRANSIENT: Final = (
    BusError,
    BucketError,
    BucketUnfitError,
    HookFailedError,
    NoRoomError,
    ChunkAlteredError,
    ChunkMissingError,
    DeviceError,
    ServiceRefusedError,
    ServiceUnreachableError,
    UpdateRefusedError,
    VersionRefusedError,
)
_RETRY_S: Final = 2.0


class Following:
    """The versions of one engine. What the actor announces is set here."""

    def __init__(
        self,
        actor: EngineActor,
        settings: EngineConfig,
        group: str,
        session: aiohttp.ClientSession,
        control: EngineControl,
    ) -> None:
        self._actor = actor
        self._settings = settings
        self._group = group
        self._session = session
        self._control = control
        self._standing = Standing(actor.context)
        self._trials = Trials(actor, settings, group, control)
        self._origin = Origin(actor.context, settings, session)
        self._answers = False
        self._receiver: Receiver | None = None
        self._listening: asyncio.Task[None] | None = None
        self._look_again: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """For ever."""
        self._relay = Relay(self._actor.context, await carrier_of(self._actor.context))
        self._receiver = receiver = await self._made()
        self._actor.become("waiting for weights")
        beside = [asyncio.create_task(self._standing.run(), name="the report of versions")]
        beside += [self._listening] if self._listening else []
        try:
            async with Roster(self._actor.bus, "checkpoint").open() as services, self._relay.running():
                self._actor.facts = {**self._actor.facts, **self._relay.facts}
                await _with(beside, self._follow(receiver, services))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._origin.close()
            await receiver.close()
            await self._relay.close()

    async def settled(self, limit_s: float) -> None:
        """Returns when no update is under way, at the latest after `limit_s`."""
        if self._receiver is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._receiver.settled()

    async def check(self) -> None:
        """Whether the engine still serves what was put there: one that was started anew by others has lost it, and takes no
        traffic until it has the head again. Raises EngineError."""
        serves, receiver = self._actor.facts.get("version"), self._receiver
        if serves is None or receiver is None or receiver.quarantined is not None:
            return
        if self._is_between(receiver):
            return
        found = await self._control.live_label()
        if self._is_between(receiver) or self._actor.facts.get("version") != serves:
            return  # it was asked before an update, or in the middle of one
        if found != serves:
            _log.warning(
                "the engine says it serves %r, expected %r: it was started anew, and gets all again", found, serves
            )
            self._forget(receiver)
        elif self._actor.own_state == UNREACHABLE:
            self._actor.become("ready")  # it did not answer for a while, and is the same

    def _is_between(self, receiver: Receiver) -> bool:
        """Two versions: what it serves says nothing, and it is not to take traffic because it answers."""
        return receiver.touching or self._trials.judging or self._actor.own_state == HANDING_OVER

    def _forget(self, receiver: Receiver) -> None:
        self._actor.facts = {name: value for name, value in self._actor.facts.items() if name != "version"}
        self._actor.become("waiting for weights")
        receiver.engine_restarted(None)
        self._look_again()

    async def _follow(self, receiver: Receiver, services: Roster) -> None:
        """Brings the engine to each head as it comes, for ever."""
        heads: Register[states.Head] = Register(self._actor.bus, self._actor.publisher, "weights", states.Head)
        key = head_key(self._actor.config, self._group)
        async with heads.watch(*key) as changed:
            self._look_again = changed.set
            while True:
                changed.clear()
                try:
                    head = (await heads.get(*key)).value
                except BusError as error:  # no event says when a server that is back serves its streams again
                    _log.warning("the head cannot be read now, trying again: %s", error)
                    await _either(changed, services, _RETRY_S)
                    continue
                if head is not None and not await self._bring_to(head, receiver, services):
                    # Not reached: try again when the head or the holders change, at the latest after a moment.
                    await _either(changed, services, _RETRY_S)
                    continue
                await changed.wait()

    async def _made(self) -> Receiver:
        context, settings, name = self._actor.context, self._settings, self._actor.context.identity.instance
        area = await asyncio.to_thread(weights_area, context.folder, context.config)
        staging = await asyncio.to_thread(Staging, area, name, settings.weights_folder)
        agent_log = context.folder.logs / f"{name}.weights.log"
        try:
            transport = await transport_for(settings, self._control, staging, engine_python(settings), agent_log, name)
        except TransportUnfitError as error:
            raise UnrecoverableError(f"engines.{self._group}: {error}") from error
        except DeviceError as error:
            raise ActorError(f"engines.{self._group}.transport {settings.transport}: {error}") from error
        if isinstance(transport, NcclTransport):
            self._listening = asyncio.create_task(listen(self._actor, transport), name="the ear for broadcasts")
        quantisation = await asyncio.to_thread(served_quantisation, context.folder, context.config)
        return Receiver(
            self._control,
            staging,
            self._session,
            live=None,
            expected=await asyncio.to_thread(forms_in, served_model(context.folder, context.config).resolve()),
            whole=quantisation is not None,
            mode="in_place" if settings.paired else settings.pause,  # handed_over has emptied a half of a pair
            transport=transport,
            holdings=self._relay.holdings,
            carrier=self._relay.carrier,
            mirror=self._origin.mirror,
            differences=context.config.checkpoint.differences,
            turn=self._turn,
            on_state=self._standing.set,
        )

    @asynccontextmanager
    async def _turn(self, label: str) -> AsyncIterator[None]:
        """A half of a pair gives back what it has before it takes other weights: KV that another server made, or is to go on
        from, would be of other weights than its own. SGLang's own retraction asks the prefill server for that KV again,
        whatever that one serves by then, and cannot flush while anything waits for a transfer."""
        async with self._trials.turn(label):
            fresh = self._receiver is None or self._receiver.live is None
            if fresh or not self._settings.paired or self._settings.pause == "in_place":
                yield
                return
            before = self._actor.own_state
            self._actor.become(HANDING_OVER)
            try:
                await hand_over(self._control)
                yield
            except EngineQuarantineError:
                raise
            except BaseException:
                if self._actor.own_state == HANDING_OVER:
                    self._actor.become(before)
                raise

    async def _bring_to(self, head: states.Head, receiver: Receiver, services: Roster) -> bool:
        """Whether the engine now serves `head` (or something newer), or what passed before, where that was refused. Raises
        NothingPassedError."""
        live = receiver.live
        try:
            wanted = await self._trials.wanted(head, serves_nothing=live is None)
        except BusError as error:
            _log.warning("nobody says whether %s was refused: %s", head.label, error)
            return False
        version = Version.parse(wanted.label)
        if live is not None and (live == version or (live > version and wanted.label == head.label)):
            return True
        if live is not None and live > version:
            self._forget(receiver)  # of the refused version
        reached = await self._bring(wanted, receiver, services)
        if reached and wanted.label != head.label:
            self._look_again()  # the head may be on trial only
        return reached

    async def _bring(self, wanted: Wanted, receiver: Receiver, services: Roster) -> bool:
        """Whether the engine now serves the version (or something newer)."""
        label = wanted.label
        urls = self._origin.urls(services)
        if not urls and self._origin.mirror is None:
            _log.warning("%s cannot be fetched: no checkpoint service has announced itself", label)
            return False
        self._standing.set(label, "announced")
        try:
            manifest = await self._origin.manifest(wanted, urls)
            before = self._actor.config.checkpoint.before_pull
            if before is not None:
                await called(before, "checkpoint.before_pull", manifest)
            swap = await receiver.apply(manifest, urls, self._origin.token, self._relay.peers(self._origin.is_mirror))
        except StaleVersionError:
            return True
        except ManifestError as error:
            raise UnrecoverableError(f"{label} does not fit the model that this engine serves: {error}") from error
        except EngineQuarantineError as error:
            self._actor.become("quarantined")
            self._standing.set(label, "quarantined", str(error))
            await self._standing.flush()
            raise ActorError(f"the engine is quarantined and is started anew: {error}") from error
        except _TRANSIENT as error:
            _log.warning("%s not applied, the engine serves %s: %s", label, self._actor.facts.get("version"), error)
            self._standing.set(label, "refused", str(error))
            if receiver.live is None and "version" in self._actor.facts:
                self._forget(receiver)  # it was started anew by others
            return False
        finally:
            if self._trials.judging and receiver.live != Version.parse(label):
                self._trials.stand_down()
        if await self._refused(manifest, receiver):
            return False
        self._standing.set(label, "live")
        await self._announce_swap(swap)
        return True

    async def _refused(self, manifest: Manifest, receiver: Receiver) -> bool:
        """Judges what a canary serves; it gives back what it refuses, or what it cannot tell the others about."""
        if not self._trials.judging:
            return False
        self._standing.set(manifest.label, "canary")
        try:
            reason = await self._trials.refused(manifest)
        except BusError as error:
            reason = f"the verdict could not be told: {error}"
        finally:
            self._trials.judging = False
        if reason is None:
            return False
        self._standing.set(manifest.label, "refused", reason)
        self._forget(receiver)
        return True

    async def _answering(self) -> None:
        """An engine that waited for its first weights begins to serve a moment after it got them."""
        if not self._settings.starts_empty or self._answers:
            return
        limit_s = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await until_healthy(self._control)
        except TimeoutError as error:
            raise ActorError(f"the engine got its first weights and made no token within {limit_s:g} s") from error
        self._answers = True

    async def _announce_swap(self, swap: SwapRecord) -> None:
        actor = self._actor
        await self._answering()
        actor.facts = {**actor.facts, "version": str(swap.version)}
        actor.numbers |= {"pause_ms": round(1e3 * swap.pause_s, 1), "updates": actor.numbers.get("updates", 0) + 1}
        actor.progressed()
        actor.become("ready")
        await actor.context.emit(
            "swap",
            {
                "version": str(swap.version),
                "transport": swap.transport,
                "pause_s": swap.pause_s,
                "fetch_s": swap.fetch_s,
                "bytes": swap.bytes_fetched,
                "bytes_applied": swap.bytes_applied,
                "swapped_at": swap.swapped_at,
            },
        )


async def _with(beside: Sequence[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Ends with `work`, or with the first of `beside` that does: an engine that hears or tells nothing more must not go on as
    if it did. Raises what `work` raises, ActorError for the others."""
    working = asyncio.create_task(work, name="follow the head")
    try:
        done, _ = await asyncio.wait({working, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        (ended, *_) = done
        error = ended.exception()
        raise ActorError(
            f"{ended.get_name()} ended ({error!r}), expected it for ever; the actor is started anew"
        ) from error
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _either(changed: asyncio.Event, services: Roster, timeout_s: float) -> None:
    waiters = {asyncio.ensure_future(changed.wait()), asyncio.ensure_future(services.wait_change(timeout_s))}
    try:
        await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
