"""How an actor stores and reads blobs, wherever it runs: in the run's folder, or over HTTP in the checkpoint actors' stores.

    put    own folder, if this machine has it --> further stores until `blobs.replicas` have it on disk --> acknowledged
    get    own folder, or cache --> every other store, until one has the bytes whole --> what was lacking is repaired

Invariant: `put` returns only when so many different stores have the verified bytes fsynced; `get` returns only verified
bytes. Disk and hashing happen in threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from physarum.bus import room
from physarum.bus.blob_cache import BlobCache
from physarum.bus.blob_replicas import Replicas, announced
from physarum.bus.blobs import BlobRef, BlobStore
from physarum.bus.connection import Bus
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobNoRoomError,
    BlobUnreachableError,
    BusError,
    BusUnreachableError,
)
from physarum.configs.blobs import BlobsConfig

_log = logging.getLogger(__name__)

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_NO_ROOM_S: Final = 2.0
"""Longest pause before a store whose disk was full is asked again: it has no event for room."""
_KEPT_PER_GRACE: Final = 3
_LEAST_KEEP_S: Final = 1.0


class Blobs:
    """The blobs of one actor. `host` is this machine's name, `cache` a folder of this process alone."""

    def __init__(
        self, bus: Bus, folder: Path, cache: Path, config: BlobsConfig, token_env: str | None, host: str
    ) -> None:
        self._bus, self._config, self._token_env, self._host = bus, config, token_env, host
        self._folder = BlobStore(folder)
        self._cache = BlobCache(cache, config.cache_bytes)
        self._cache_turn = asyncio.Lock()
        self._local: bool | None = None if config.access == "auto" else config.access == "folder"

    async def put(self, data: bytes, stop: asyncio.Event) -> BlobRef:
        """Stores bytes durably in `blobs.replicas` stores; waits while a disk is full.

        Raises BlobReplicasError when there are not enough stores within the deadline, OSError for other faults of this
        disk, and what a full disk raised once `stop` is set.
        """
        while True:
            try:
                return await self._put(data)
            except OSError as error:
                if not room.is_full(error) or not await room.until_room(self._folder.folder.parent, "a blob", stop):
                    raise
            except BlobNoRoomError as error:
                _log.error("a blob of %d bytes waits for room, nothing is lost: %s", len(data), error)
                if await _set_within(stop, random.uniform(_NO_ROOM_S / 2, _NO_ROOM_S)):
                    raise
            except BusUnreachableError as error:  # raised after a deadline, so this does not spin
                _log.warning("a blob of %d bytes waits for the bus, which knows its stores: %s", len(data), error)
                if stop.is_set():
                    raise

    @asynccontextmanager
    async def held(self, data: bytes, stop: asyncio.Event) -> AsyncIterator[BlobRef]:
        """Stores `data` as `put` does and keeps them young while the block lasts: until the message that refers to them
        is published, however long a full stream makes that wait, no sweep takes them."""
        ref = await self.put(data, stop)
        clock = asyncio.get_running_loop().time
        period_s = max(_LEAST_KEEP_S, self._config.grace_s / _KEPT_PER_GRACE)
        keeper = asyncio.create_task(self._keep(data, period_s, stop), name=f"blob {ref.digest}")
        began = clock()
        try:
            yield ref
            if clock() - began > period_s:  # this process may have been stopped meanwhile, and its keeper with it
                await self.put(data, stop)
        finally:
            keeper.cancel()

    async def get(self, ref: BlobRef) -> bytes:
        """The verified bytes; a copy that is missing or altered is repaired from a whole one.

        Raises BlobMissingError, BlobAlteredError, or BlobUnreachableError when a store that may have it does not answer
        until the deadline.
        """
        fault: BusError | None = None
        if self._local is not False:
            try:
                return await asyncio.to_thread(self._folder.get, ref)
            except (BlobMissingError, BlobAlteredError) as error:
                fault = error
        if not self._local and (cached := await self._from_cache(ref)) is not None:
            return cached
        try:
            return await self._get_elsewhere(ref, fault)
        except BusUnreachableError as error:
            raise BlobUnreachableError(f"blob {ref.digest}: its stores cannot be looked for: {error}") from error

    async def _put(self, data: bytes) -> BlobRef:
        local, have = await self._located(), set[str]()
        if local:
            ref = await asyncio.to_thread(self._folder.put, data)
            if self._config.replicas == 1:
                return ref
            have.add(await asyncio.to_thread(self._folder.identity))
        else:
            ref = await asyncio.to_thread(BlobRef.of, data)
        async with self._announced() as others:
            await others.put(ref, data, have)
        if not local:
            await self._to_cache(ref, data)
        return ref

    async def _get_elsewhere(self, ref: BlobRef, fault: BusError | None) -> bytes:
        """`fault`: what is wrong with the copy in the folder, if there is one."""
        async with self._announced() as others:
            if not await self._is_local(others.identities):
                data = await others.get(ref, set(), None)
                await self._to_cache(ref, data)
                return data
            own = await asyncio.to_thread(self._folder.known_identity)
            data = await others.get(ref, {own} if own else set(), fault)
        await self._repair(ref, data)
        return data

    async def _located(self) -> bool:
        """Whether this machine has a store of the run in its folder."""
        if self._local is not None:
            return self._local
        try:
            async with self._announced() as others:
                return await self._is_local(others.identities)
        except BusUnreachableError:
            return await self._is_local(set())

    async def _is_local(self, stores: set[str]) -> bool:
        """The same, by the ids of the stores that were announced.

        A checkpoint actor's word decides for good: its store is ours, or it is not. While none has announced itself, a
        store that was made here counts, and so does the folder beside a bus that only this machine can reach.
        """
        if self._local is not None:
            return self._local
        own = await asyncio.to_thread(self._folder.known_identity)
        if stores:
            self._local = own in stores
            _log.info("blobs are %s", f"in {self._folder.folder}" if self._local else "read and written over HTTP")
            return self._local
        return own is not None or urlsplit(self._bus.endpoint.url).hostname in _LOOPBACK

    def _announced(self) -> AbstractAsyncContextManager[Replicas]:
        return announced(self._bus, self._config, self._token_env, self._host)

    async def _keep(self, data: bytes, period_s: float, stop: asyncio.Event) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.put(data, stop)
            except (BusError, OSError) as error:
                _log.warning("a blob whose message waits could not be kept young: %s", error)

    async def _repair(self, ref: BlobRef, data: bytes) -> None:
        try:
            await asyncio.to_thread(self._folder.put, data)
            _log.warning("blob %s was missing or altered in %s and is repaired", ref.digest, self._folder.folder)
        except OSError as error:
            _log.warning("blob %s cannot be repaired in %s: %s", ref.digest, self._folder.folder, error)

    async def _from_cache(self, ref: BlobRef) -> bytes | None:
        async with self._cache_turn:
            return await asyncio.to_thread(self._cache.get, ref)

    async def _to_cache(self, ref: BlobRef, data: bytes) -> None:
        async with self._cache_turn:
            await asyncio.to_thread(self._cache.put, ref, data)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
