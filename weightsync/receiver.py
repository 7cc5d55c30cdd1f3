"""Beside each engine: fetches a version, verifies it, and only then touches the engine.

Invariant: the engine serves either the weights it served before, or those of the manifest, complete and verified.
A failure before the swap leaves it as it was (UpdateRefusedError and others say why). After the pause nothing is known
unless the engine itself confirms the new label: any failure then is EngineQuarantineError, the engine stays paused, and
this receiver refuses further work until `engine_restarted`. A lower (epoch, number) than the live one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from physarum.bus.version import Version
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    EngineQuarantineError,
    ManifestError,
    ServiceRefusedError,
    ServiceUnreachableError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.layout import Form, check_fits
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Held, Part, remove_others
from physarum.weightsync.target import PauseMode, WeightTarget

_log = logging.getLogger(__name__)

DEFAULT_CONCURRENCY: Final = 8


class SwapRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One completed update. `pause_s`: the engine stood still; `fetch_s`: fetching, verifying and staging, while it
    generated; `swapped_at`: Unix seconds at which it went on with the new weights."""

    version: Version
    pause_s: float
    fetch_s: float
    bytes_fetched: int
    bytes_reused: int
    swapped_at: float


class _Tally:
    """Bytes of one staging, by where they came from."""

    def __init__(self) -> None:
        self.fetched = 0
        self.reused = 0


class Receiver:
    """Updates one engine. `live` is the version it serves now (None: unknown, older than all).

    `expected` are the tensors of its model (layout.forms_in): a version that holds others is refused before the pause;
    so is one whose `model_digest` differs. `staging` is this receiver's own folder, emptied at the start.
    """

    def __init__(
        self,
        target: WeightTarget,
        staging: Path,
        session: aiohttp.ClientSession,
        *,
        live: Version | None = None,
        expected: Mapping[str, Form] | None = None,
        model_digest: str | None = None,
        mode: PauseMode = "retract",
        concurrency: int = DEFAULT_CONCURRENCY,
        chunk_timeout_s: float = 30.0,
    ) -> None:
        self.live = live
        self.quarantined: str | None = None
        self.checksum_failures = 0
        self._target = target
        self._staging = staging
        self._session = session
        self._expected = dict(expected) if expected is not None else None
        self._model_digest = model_digest
        self._mode: PauseMode = mode
        self._concurrency = concurrency
        self._chunk_timeout_s = chunk_timeout_s
        self._held: Held | None = None
        self._one_at_a_time = asyncio.Lock()
        remove_others(staging, keep=lambda folder: False)

    async def apply(self, manifest: Manifest, source_urls: Sequence[str], token: str | None) -> SwapRecord:
        """Brings the engine to `manifest`; sources are tried in the order given, for each chunk.

        Raises StaleVersionError, ManifestError, UpdateRefusedError, ChunkMissingError, ChunkAlteredError,
        ServiceUnreachableError, ServiceRefusedError: the engine serves what it served. EngineQuarantineError: it serves
        nothing and must be started anew.
        """
        async with self._one_at_a_time:
            self._admit(manifest)
            started = time.perf_counter()
            tally = _Tally()
            staged = await self._stage(manifest, source_urls, token, tally)
            fetch_s = time.perf_counter() - started
            pause_s = await self._swap(staged.folder, manifest.label)
            swapped_at = time.time()
            self.live, self._held = manifest.version, staged
            await asyncio.to_thread(remove_others, self._staging, lambda folder: folder == staged.folder)
        _log.info("%s is live: paused %.1f ms, staged in %.1f ms", manifest.label, 1e3 * pause_s, 1e3 * fetch_s)
        return SwapRecord(
            version=manifest.version,
            pause_s=pause_s,
            fetch_s=fetch_s,
            bytes_fetched=tally.fetched,
            bytes_reused=tally.reused,
            swapped_at=swapped_at,
        )

    async def close(self) -> None:
        """Gives back what is staged (host memory, where it is in shared memory). The engine needs none of it."""
        async with self._one_at_a_time:
            self._held = None
            await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)

    def engine_restarted(self, live: Version | None) -> None:
        """The engine was started anew with `live`. What is staged stays a source of chunks."""
        self.live = live
        self.quarantined = None

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

    async def _stage(self, manifest: Manifest, urls: Sequence[str], token: str | None, tally: _Tally) -> Held:
        part = await asyncio.to_thread(Part, self._staging, manifest)
        sources = [CheckpointClient(url, token, self._session, self._chunk_timeout_s) for url in urls]
        queue = iter(manifest.sizes().items())

        async def work() -> None:
            for digest, size in queue:
                await self._place(part, digest, size, sources, tally)

        workers = [asyncio.create_task(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
            return await asyncio.to_thread(part.complete)
        except BaseException:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            part.discard()
            raise

    async def _place(
        self, part: Part, digest: str, size: int, sources: Sequence[CheckpointClient], tally: _Tally
    ) -> None:
        data = await asyncio.to_thread(self._held.read, digest) if self._held is not None else None
        if data is not None and len(data) == size:
            tally.reused += size
        else:
            data = await self._fetch(digest, size, sources)
            tally.fetched += size
        await asyncio.to_thread(part.write, digest, data)

    async def _fetch(self, digest: str, size: int, sources: Sequence[CheckpointClient]) -> bytes:
        """From the first source that has it unaltered. Raises what the last one failed with."""
        last: Exception = ChunkMissingError(f"chunk {digest} has no source; name at least one checkpoint service")
        for source in sources:
            try:
                return await source.get_chunk(digest, size)
            except ChunkAlteredError as error:
                self.checksum_failures += 1
                last = error
            except (ChunkMissingError, ServiceUnreachableError, ServiceRefusedError) as error:
                last = error
            _log.warning("chunk %s is not taken from %s: %s", digest, source.url, last)
        raise last

    async def _swap(self, folder: Path, label: str) -> float:
        """Seconds the engine stood still."""
        try:
            await self._target.check_pause_mode(self._mode)
        except Exception as error:
            raise UpdateRefusedError(f"the engine cannot be updated to {label}: {error}") from error
        started = time.perf_counter()
        await self._pause(label)
        try:
            await self._target.update_from_disk(folder, label, self._mode)
            found = await self._target.live_label()
            if found != label:
                raise ManifestError(f"the engine says it serves {found!r}, expected {label!r}")
            await self._target.continue_generation()
        except BaseException as error:
            self.quarantined = f"update to {label}: {error or type(error).__name__}"
            if not isinstance(error, Exception):
                raise  # cancelled: the owner is stopping, and the flag stays
            raise EngineQuarantineError(
                f"the engine failed while it was being updated to {label}, and its weights are not known: {error};"
                " it stays paused and must be started anew"
            ) from error
        return time.perf_counter() - started

    async def _pause(self, label: str) -> None:
        """The weights are still the old ones: an engine that could not be paused may go on, if it says that it does."""
        try:
            await self._target.pause(self._mode)
        except BaseException as error:
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
