"""The blob stores that checkpoint actors announce, as one: written to until enough have a blob, read until one has it whole.

Invariant: a copy that was found missing or altered is repaired from the whole one before the reader gets it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from physarum.bus.blob_remote import RemoteStore
from physarum.bus.blobs import BlobRef
from physarum.bus.connection import Bus
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobNoRoomError,
    BlobReplicasError,
    BlobUnreachableError,
    BusError,
)
from physarum.bus.presence import Heartbeat, Roster
from physarum.configs.blobs import BlobsConfig
from physarum.configs.secrets import read_secret

_log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Longest pause before a store that was silent is asked again; a change of presence ends it."""
_LEAST_BYTES_PER_S: Final = 1 << 20


class Replicas:
    """The stores of a run as they are now. Make it by `announced`; `host` is this machine's name."""

    def __init__(self, roster: Roster, config: BlobsConfig, token_env: str | None, host: str) -> None:
        self._roster, self._config, self._token_env, self._host = roster, config, token_env, host

    @property
    def identities(self) -> set[str]:
        return {beat.facts["store"] for beat in self._members()}

    async def put(self, ref: BlobRef, data: bytes, have: set[str]) -> None:
        """Until `blobs.replicas` stores have it on disk, those in `have` included.

        Raises BlobReplicasError after the deadline, BlobNoRoomError when only a full disk keeps it from succeeding.
        """
        faults: dict[str, str] = {}
        limit_s = self._config.timeout_s + ref.size / _LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                while not await self._put_once(ref, data, have, faults):
                    await self._roster.wait_change(random.uniform(_LOOK_S / 2, _LOOK_S))
        except TimeoutError as error:
            there = ", ".join(beat.instance for beat in self._members()) or "none"
            raise BlobReplicasError(
                f"blob {ref.digest} ({ref.size} bytes) is on disk in {len(have)} of {self._config.replicas} stores"
                f" (blobs.replicas) after {limit_s:.3g} s; announced: {there}; {'; '.join(faults.values()) or 'no answer'}."
                " Start the checkpoint actors that are missing (checkpoint.count), or lower blobs.replicas; the message that"
                " refers to it is not published"
            ) from error

    async def get(self, ref: BlobRef, without: set[str], fault: BusError | None) -> bytes:
        """From the first store that has it whole. `without`: stores that were looked into, where `fault` was found.

        Raises BlobMissingError, BlobAlteredError, or BlobUnreachableError when no store answers until the deadline.
        """
        deadline = asyncio.get_running_loop().time() + self._config.timeout_s
        while True:
            stores = [store for store in self._nearest() if store.identity not in without]
            found = await self._get_once(ref, stores)
            if isinstance(found, bytes):
                return found
            silent = [error for error in found if isinstance(error, BlobUnreachableError)]
            if not silent and (stores or fault):
                raise _worst([fault, *found])
            if asyncio.get_running_loop().time() >= deadline:
                raise BlobUnreachableError(
                    f"blob {ref.digest} ({ref.size} bytes) cannot be read within {self._config.timeout_s:g} s:"
                    f" {silent[0] if silent else 'no checkpoint actor has announced a store; is one running?'}"
                )
            await self._roster.wait_change(random.uniform(_LOOK_S / 2, _LOOK_S))

    async def _put_once(self, ref: BlobRef, data: bytes, have: set[str], faults: dict[str, str]) -> bool:
        """One try at every store that is needed; `have` and `faults` (by address) grow. True when enough have it."""
        full: BlobNoRoomError | None = None
        for store in self.stores():
            if len(have) >= self._config.replicas:
                break
            if store.identity in have:
                continue
            try:
                await store.put(ref, data)
                have.add(store.identity)
            except BlobNoRoomError as error:
                full = error
            except (BlobUnreachableError, BlobAlteredError) as error:
                faults[store.url] = str(error)
        if len(have) < self._config.replicas and full is not None:
            raise full
        return len(have) >= self._config.replicas

    async def _get_once(self, ref: BlobRef, stores: list[RemoteStore]) -> bytes | list[BusError]:
        """The bytes, or what is wrong with each store."""
        faults: list[BusError] = []
        lacking: list[RemoteStore] = []
        for store in stores:
            try:
                data = await store.get(ref)
            except BlobUnreachableError as error:
                faults.append(error)
            except (BlobMissingError, BlobAlteredError) as error:
                faults.append(error)
                # With one copy of each blob, most stores rightly do not have it.
                if isinstance(error, BlobAlteredError) or self._config.replicas > 1:
                    lacking.append(store)
            else:
                await _repair(ref, data, lacking)
                return data
        return faults

    def stores(self) -> list[RemoteStore]:
        """In the order in which they are written to: the first one's folder, which is the run's own, has what there is."""
        return [self._store(beat) for beat in self._members()]

    def _nearest(self) -> list[RemoteStore]:
        """In the order in which they are read: those of this machine first."""
        return [self._store(beat) for beat in sorted(self._members(), key=lambda beat: beat.host != self._host)]

    def _store(self, beat: Heartbeat) -> RemoteStore:
        token = read_secret(self._token_env)
        return RemoteStore(beat.facts["store"], beat.facts["url"], token, self._config.timeout_s)

    def _members(self) -> list[Heartbeat]:
        return [beat for beat in self._roster.members if "url" in beat.facts and "store" in beat.facts]


@asynccontextmanager
async def announced(bus: Bus, config: BlobsConfig, token_env: str | None, host: str) -> AsyncIterator[Replicas]:
    """The stores that are there, kept current in the block. `token_env` names the variable that holds the token; it is read
    when a store is used, which raises SecretError when it is not set."""
    async with Roster(bus, "checkpoint").open() as roster:
        yield Replicas(roster, config, token_env, host)


async def _repair(ref: BlobRef, data: bytes, stores: list[RemoteStore]) -> None:
    for store in stores:
        try:
            await store.put(ref, data)
            _log.warning("blob %s was missing or altered at %s and is repaired", ref.digest, store.url)
        except BusError as error:
            _log.warning("blob %s cannot be repaired at %s: %s", ref.digest, store.url, error)


def _worst(faults: list[BusError | None]) -> BusError:
    """Altered bytes say more than missing ones."""
    present = [fault for fault in faults if fault is not None]
    return next((fault for fault in present if isinstance(fault, BlobAlteredError)), present[0])
