"""Beside each engine: fetches a version, verifies it, and only then touches the engine.

Invariant: the engine serves either the weights it served before, or those of the manifest, complete and verified.
A failure before the swap leaves it as it was (UpdateRefusedError and others say why). After the pause nothing is known
unless the engine itself confirms the new label: any failure then is EngineQuarantineError, the engine stays paused, and
this receiver refuses further work until `engine_restarted`. A lower (epoch, number) than the live one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Final, Literal

import aiohttp
import msgspec

from physarum.bus.version import Version
from physarum.weightsync.alone import alone
from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.errors import (
    ChunkAlteredError,
    EngineQuarantineError,
    ManifestError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.fetching import PEER_TIMEOUT_S, Fetch
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.holdings import Holdings
from physarum.weightsync.layout import Form, check_fits
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.mirror.reading import Mirror
from physarum.weightsync.pace import Differences, Pace
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging, changed_tensors, verify_tensors
from physarum.weightsync.target import PauseMode, WeightTarget
from physarum.weightsync.transports.disk import DiskTransport
from physarum.weightsync.transports.transport import Transport

_log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY: Final = min(16, max(4, (os.cpu_count() or 1) // 4))
"""Chunks under way at once: copying, hashing and reading are all bound by one core each."""

State = Literal["staged", "verified"]
"""How far a version has come before the engine is touched."""


class SwapRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One completed update. `pause_s`: the engine stood still; `fetch_s`: fetching, verifying and staging, while it
    generated; `swapped_at`: Unix seconds at which it went on with the new weights; `bytes_applied`: of the changed tensors;
    `transport`: what brought them into the engine."""

    version: Version
    transport: str
    pause_s: float
    fetch_s: float
    bytes_fetched: int
    bytes_reused: int
    bytes_applied: int
    swapped_at: float


class Receiver:
    """Updates one engine. `live` is the version it serves now (None: unknown, older than all).

    `expected` are the tensors of its model (layout.forms_in): a version that holds others is refused before the pause;
    so is one whose `model_digest` differs. `whole`: every version is loaded with all its tensors, also what did not change: for
    an engine that repacks what it loads. `staging` is this receiver's own; `keep_last` versions stay in its area where no
    checkpoint service keeps them. `turn`: a verified version (label) waits in it before the engine is paused; what it raises
    `apply` raises. `transport` brings it into the engine; without one the engine reads a folder. `holdings` are told what is
    brought to this host, for other receivers. `differences`: whether chunks are taken as what differs from the version before
    (pace.py). `carrier`: how chunks travel beside HTTP, the caller's to close. `mirror`: an object store that is asked for each
    chunk that no other holder gave.
    """

    def __init__(
        self,
        target: WeightTarget,
        staging: Staging,
        session: aiohttp.ClientSession,
        *,
        live: Version | None = None,
        expected: Mapping[str, Form] | None = None,
        whole: bool = False,
        model_digest: str | None = None,
        mode: PauseMode = "retract",
        concurrency: int = DEFAULT_CONCURRENCY,
        chunk_timeout_s: float = 30.0,
        keep_last: int = 2,
        transport: Transport | None = None,
        holdings: Holdings | None = None,
        differences: Differences = "auto",
        carrier: Carrier | None = None,
        mirror: Mirror | None = None,
        turn: Callable[[str], AbstractAsyncContextManager[None]] = lambda label: nullcontext(),
        on_state: Callable[[str, State], None] = lambda label, state: None,
    ) -> None:
        self.live = live
        self.quarantined: str | None = None
        self.touching = False
        """Whether the engine is being updated just now: what it says that it serves may change at any moment."""
        self._waiting: asyncio.Timeout | None = None
        self._altered = 0
        self._target = target
        self._staging = staging
        self._session = session
        self._expected = dict(expected) if expected is not None else None
        self._whole = whole
        self._model_digest = model_digest
        self._mode: PauseMode = mode
        self._concurrency = concurrency
        self._chunk_timeout_s = chunk_timeout_s
        self._keep_last = keep_last
        self._transport: Transport = transport or DiskTransport(target, staging)
        self._holdings = holdings
        self._pace = Pace(differences)
        self._carrier = carrier
        self._mirror = mirror
        self._turn = turn
        self._on_state = on_state
        self._manifest: Manifest | None = None
        """Of what the engine serves, if this receiver put it there."""
        self._base: Manifest | None = None
        """Of the newest version that this receiver brought to its host."""
        self._one_at_a_time = asyncio.Lock()

    async def apply(
        self, manifest: Manifest, source_urls: Sequence[str], token: str | None, peers: Sequence[str] = ()
    ) -> SwapRecord:
        """Brings the engine to `manifest`; sources are tried in the order given, for each chunk, and before them `peers`, other
        hosts' receivers.

        Raises StaleVersionError, ManifestError, UpdateRefusedError, ChunkMissingError, ChunkAlteredError, NoRoomError,
        DeviceError, ServiceUnreachableError, ServiceRefusedError: the engine serves what it served. EngineQuarantineError:
        it serves nothing and must be started anew.
        """
        async with self._one_at_a_time:
            self._admit(manifest)
            started, before = time.perf_counter(), self._manifest
            changed = changed_tensors(manifest, None if self._whole else before)
            try:
                file, fetched = await self._at_hand(manifest, source_urls, token, peers)
                self._on_state(manifest.label, "staged")
                with file or nullcontext():
                    await self._prepare(file, manifest, changed)
                    fetch_s = time.perf_counter() - started
                    self._on_state(manifest.label, "verified")
                    async with AsyncExitStack() as stack:
                        await self._wait(stack, manifest.label, before)
                        self.touching = True
                        pause_s = await self._swap(manifest.label)
            finally:
                try:
                    await self._transport.clear()
                finally:
                    self.touching = False
            swapped_at = time.time()
            self.live, self._manifest = manifest.version, manifest
            if file is not None:
                self._base = manifest
        _log.info("%s is live: paused %.1f ms, staged in %.1f ms", manifest.label, 1e3 * pause_s, 1e3 * fetch_s)
        return SwapRecord(
            version=manifest.version,
            transport=self._transport.name,
            pause_s=pause_s,
            fetch_s=fetch_s,
            bytes_fetched=fetched,
            bytes_reused=manifest.total_bytes - fetched,
            bytes_applied=sum(tensor.size_bytes for tensor in changed),
            swapped_at=swapped_at,
        )

    @property
    def checksum_failures(self) -> int:
        """How often bytes were not what a manifest says, since the start."""
        return self._altered + self._transport.altered

    @property
    def updating(self) -> bool:
        """Whether a version is on its way to the engine, or waits for its turn."""
        return self._one_at_a_time.locked()

    async def settled(self) -> None:
        """Returns once no update is under way; the caller has a deadline."""
        async with self._one_at_a_time:
            return

    async def close(self) -> None:
        """Removes what is staged. The engine needs none of it."""
        async with self._one_at_a_time:
            await self._transport.close()
            if self._holdings is not None:
                await in_thread(self._holdings.close)

    def engine_restarted(self, live: Version | None) -> None:
        """The engine was started anew with `live`, so all of the next version is applied; an update that waits for its turn
        is given up."""
        self.live = live
        self._manifest = None
        self.quarantined = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.reschedule(asyncio.get_running_loop().time())

    def _admit(self, manifest: Manifest) -> None:
        if self.quarantined is not None:
            raise EngineQuarantineError(f"the engine is quarantined ({self.quarantined}); start it anew first")
        if self.live is not None and manifest.version <= self.live:
            raise StaleVersionError(f"{manifest.label} is not newer than {self.live}, which the engine serves")
        if self._model_digest is not None and manifest.model_digest != self._model_digest:
            raise ManifestError(
                f"{manifest.label} is of the model with digest {manifest.model_digest}, the engine serves"
                f" {self._model_digest}"
            )
        if self._expected is not None:
            check_fits(manifest, self._expected)

    async def _wait(self, stack: AsyncExitStack, label: str, before: Manifest | None) -> None:
        """Until it is this engine's turn. Raises UpdateRefusedError, as soon as it is known, where the engine was started anew
        since `before` was put there: what was prepared is only a part."""
        waiting = asyncio.timeout(None)
        try:
            if self._manifest is before:
                async with waiting as self._waiting:
                    await stack.enter_async_context(self._turn(label))
        except TimeoutError:
            if not waiting.expired():
                raise
        finally:
            self._waiting = None
        if self._manifest is not before or waiting.expired():
            raise UpdateRefusedError(f"the engine was started anew before it got {label}: it gets all of it next")

    async def _at_hand(
        self, manifest: Manifest, urls: Sequence[str], token: str | None, peers: Sequence[str]
    ) -> tuple[HeldFile | None, int]:
        """The version as a file of this host and how many bytes were fetched for it; no file where the transport has it."""
        if await self._transport.arrived(manifest):
            return None, 0
        return await self._bring(manifest, urls, token, peers)

    async def _bring(
        self, manifest: Manifest, urls: Sequence[str], token: str | None, peers: Sequence[str]
    ) -> tuple[HeldFile, int]:
        """The version in this host's memory, and how many bytes were fetched for it."""
        area = self._staging.area
        file = await in_thread(self._here, manifest.label)
        if file is not None:
            return file, 0
        async with alone(area, manifest.label):
            file = await in_thread(self._here, manifest.label)
            if file is not None:  # a receiver beside this one has fetched it meanwhile
                return file, 0
            parts = self._holdings, self._pace, self._carrier, self._mirror
            fetch = Fetch(area, manifest, self._base, self._concurrency, *parts)
            sources = [CheckpointClient(url, token, self._session, self._chunk_timeout_s) for url in urls]
            others = [CheckpointClient(url, token, self._session, PEER_TIMEOUT_S) for url in peers]
            try:
                file = await fetch.run(sources, others)
            finally:
                self._altered += fetch.altered
        await asyncio.to_thread(area.retain, self._keep_last)
        return file, fetch.fetched

    def _here(self, label: str) -> HeldFile | None:
        """The version, if this host has it undamaged."""
        try:
            return HeldFile.open(self._staging.area, label)
        except ChunkAlteredError as error:
            _log.warning("%s; it is fetched", error)
            self._altered += 1
            self._staging.area.give_up(label)
            return None

    async def _prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        """What is altered in this host's memory is given up, so that the next attempt fetches it."""
        try:
            if file is not None and not self._transport.verifies(manifest):
                await in_thread(verify_tensors, file, manifest, changed)
            await self._transport.prepare(file, manifest, changed)
        except ChunkAlteredError:
            self._altered += 1
            await in_thread(self._staging.area.give_up, manifest.label)
            raise

    async def _swap(self, label: str) -> float:
        """Seconds the engine stood still."""
        try:
            await self._target.check_pause_mode(self._mode)
            await self._target.live_label()  # it answers: what is not there is not quarantined
        except Exception as error:
            raise UpdateRefusedError(f"the engine cannot be updated to {label}: {error}") from error
        started = time.perf_counter()
        await self._pause(label)
        try:
            if self._manifest is not None:
                await self._check_base(self._manifest.label, label)
            await self._transport.load(label, self._mode)
            found = await self._target.live_label()
            if found != label:
                raise ManifestError(f"the engine says it serves {found!r}, expected {label!r}")
            await self._target.continue_generation()
        except UpdateRefusedError:
            raise
        except BaseException as error:
            self.quarantined = f"update to {label}: {error or type(error).__name__}"
            if not isinstance(error, Exception):
                raise  # cancelled: the owner is stopping, and the flag stays
            raise EngineQuarantineError(
                f"the engine failed while it was being updated to {label}, and its weights are not known: {error};"
                " it stays paused and must be started anew"
            ) from error
        return time.perf_counter() - started

    async def _check_base(self, expected: str, label: str) -> None:
        """Only what changed is about to be loaded: an engine that was started anew by others meanwhile goes on with what it
        has, and gets everything at the next attempt. Raises UpdateRefusedError."""
        found = await self._target.live_label()
        if found == expected:
            return
        self.engine_restarted(None)
        await self._target.continue_generation()
        raise UpdateRefusedError(
            f"the engine serves {found!r}, expected {expected!r}: it was started anew, and gets all of {label} next"
        )

    async def _pause(self, label: str) -> None:
        """The weights are still the old ones: an engine that could not be paused may go on, if it says that it does. One
        whose weights are not known stays as it is: it may be in the middle of somebody's update."""
        try:
            await self._target.pause(self._mode)
        except BaseException as error:
            if self.live is None and isinstance(error, Exception):
                raise UpdateRefusedError(f"the engine could not be paused for {label}: {error}") from error
            try:
                await self._target.continue_generation()
            except Exception as second:
                self.quarantined = f"pause for {label}: {error}; then continue: {second}"
                raise EngineQuarantineError(
                    f"the engine neither paused for {label} ({error}) nor went on ({second}); it must be started anew"
                ) from second
            if not isinstance(error, Exception):
                raise
            raise UpdateRefusedError(
                f"the engine could not be paused for {label}, and goes on as before: {error}"
            ) from error
