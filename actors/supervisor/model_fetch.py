"""The start model on a machine that is not the head: its own folder where that holds the same, else fetched from the head.

    the head's list of files --> model.path of this machine holds them? --> linked
                             `-> in this host's cache by their digest? --> linked
                             `-> each file over HTTP, verified, renamed as a whole --> linked

Invariant: what is linked holds the files that the head listed. Supervisors of one host fetch a model once.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec
import xxhash

from physarum.actors.context import RunFolder
from physarum.actors.model_files import ModelFile, checked_name, is_the_same, list_digest
from physarum.actors.model_maker import Reporter, StartModel, link
from physarum.actors.supervisor.errors import HeadAbsentError, StartModelError
from physarum.actors.supervisor.model_cache import cached
from physarum.agents.engine_key import bearer
from physarum.bus.connection import Bus
from physarum.bus.presence import Roster
from physarum.configs.root import RootConfig
from physarum.configs.secrets import read_secret

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
_AGAIN_S: Final = 2.0
_SILENCE_S: Final = 60.0
_LIST_S: Final = 3600.0
"""The head reads its whole model for the first list."""
_PIECE_BYTES: Final = 1 << 22


class _Source:
    """The head's checkpoint actors, wherever they are started anew."""

    def __init__(self, config: RootConfig, services: Roster, session: aiohttp.ClientSession) -> None:
        self._services, self._session = services, session
        self._limit_s, self._run = config.supervisor.join_timeout_s, config.run.name

    async def files(self) -> list[ModelFile]:
        """The list. Raises StartModelError."""
        timeout = aiohttp.ClientTimeout(total=_LIST_S)
        for attempt in range(_ATTEMPTS):
            url = await self._url()
            try:
                async with self._session.get(f"{url}/v1/start_model", timeout=timeout) as answer:
                    body = await answer.read()
                if answer.status == 200:
                    return [file for file in msgspec.json.decode(body, type=list[ModelFile]) if checked_name(file.name)]
                reason = f"{answer.status}: {body[:200].decode(errors='replace')}"
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError) as error:
                reason = str(error) or type(error).__name__
            await self._pause(attempt, reason)
        raise self._failed("the list of its files", reason)

    async def fetch(self, file: ModelFile, target: Path) -> None:
        """One file, verified. Raises StartModelError."""
        for attempt in range(_ATTEMPTS):
            url = await self._url()
            try:
                await self._written(f"{url}/v1/start_model/{quote(file.name)}", file, target)
                return
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reason = str(error) or type(error).__name__
            await self._pause(attempt, reason)
        raise self._failed(file.name, reason)

    async def _written(self, url: str, file: ModelFile, target: Path) -> None:
        digest = xxhash.xxh3_128()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
        async with self._session.get(url, timeout=timeout) as answer:
            answer.raise_for_status()
            with target.open("wb") as out:
                async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                    digest.update(piece)
                    await asyncio.to_thread(out.write, piece)
        if digest.hexdigest() != file.digest:
            raise ValueError(f"its bytes have the digest {digest.hexdigest()}, expected {file.digest}")

    async def _url(self) -> str:
        try:
            async with asyncio.timeout(self._limit_s):
                while True:
                    found = [str(beat.facts["url"]) for beat in self._services.members if "url" in beat.facts]
                    if found:
                        return found[0]
                    await self._services.wait_change(self._limit_s)
        except TimeoutError:
            raise HeadAbsentError(
                f"no checkpoint actor of run {self._run} has announced itself within {self._limit_s:g} s"
                " (supervisor.join_timeout_s); look at the head (actorctl ps)"
            ) from None

    async def _pause(self, attempt: int, reason: str) -> None:
        _log.warning("the start model is not here yet (try %d of %d): %s", attempt + 1, _ATTEMPTS, reason)
        await asyncio.sleep(_AGAIN_S)

    def _failed(self, what: str, reason: str) -> StartModelError:
        return StartModelError(
            f"the head's start model cannot be had: {what}: {reason} (after {_ATTEMPTS} tries). Remedy: see the log of"
            " checkpoint-0 on the head, and whether this host reaches its address; or put the model at model.path here"
        )


async def fetch_start_model(config: RootConfig, folder: RunFolder, bus: Bus, reporter: Reporter) -> StartModel:
    """Links the start model as `start_model` of this machine's folder. Raises StartModelError, HeadAbsentError."""
    headers = bearer(read_secret(config.checkpoint.token_env))
    async with (
        Roster(bus, "checkpoint").open() as services,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        source = _Source(config, services, session)
        files = await source.files()
        own = config.model.path
        if own is not None and await asyncio.to_thread(is_the_same, own, files):
            return link(folder, StartModel("path", str(own)))

        async def make(target: Path) -> None:
            size = sum(file.size_bytes for file in files)
            reporter.say(f"fetching the start model from the head ({size >> 20} MiB)")
            for file in files:
                (target / file.name).parent.mkdir(parents=True, exist_ok=True)
                await source.fetch(file, target / file.name)

        entry = await cached(list_digest(files), "the head's start model", make, reporter.say)
        return link(folder, StartModel("head", str(entry.folder), entry.seconds, entry.cached))
