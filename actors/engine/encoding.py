"""Encoders of images beside servers of the language model alone (SGLang's `--encoder-only`, `--language-only`).

    presence of the group's encoders --> Encoders --register, unregister--> bootstrap port of one language server

Each language server is told by its own actor, so an encoder that comes, leaves or is started anew at another port is found by
all of them. Invariant: only what the server accepted counts as told, so what failed is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Final

import aiohttp

from physarum.actors.policy_engines import READY
from physarum.bus.presence import Roster

_log = logging.getLogger(__name__)

ENCODER: Final = "encoder"
_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 2.0


class Encoders:
    """Those of `group`, for the language server whose bootstrap server is at `url`."""

    def __init__(self, url: str, group: str, session: aiohttp.ClientSession) -> None:
        self._url, self._group, self._session = url, group, session
        self.told: set[str] = set()
        self.any = asyncio.Event()

    async def follow(self, roster: Roster, changed: asyncio.Event) -> None:
        """For ever; `changed` is set by the roster. `any` is set once the server knows one."""
        while True:
            changed.clear()
            whole = await self.become(self._ready(roster))
            if self.told:
                self.any.set()
            try:
                async with asyncio.timeout(None if whole else _RETRY_S):
                    await changed.wait()
            except TimeoutError:
                continue

    def _ready(self, roster: Roster) -> set[str]:
        beats = [beat for beat in roster.members if beat.facts.get("group") == self._group and beat.state == READY]
        return {str(beat.facts["url"]) for beat in beats if beat.facts.get("role") == ENCODER and "url" in beat.facts}

    async def become(self, wanted: set[str]) -> bool:
        """Tells the server what changed; False: something failed."""
        whole = True
        for url in sorted(self.told - wanted):
            whole &= await self._tell("DELETE", "/unregister_encoder_url", url)
        for url in sorted(wanted - self.told):
            whole &= await self._tell("POST", "/register_encoder_url", url)
        return whole

    async def _tell(self, method: str, path: str, encoder: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._url + path, json={"url": encoder}, timeout=timeout
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("%s%s for %s failed: %r", self._url, path, encoder, error)
            return False
        if response.status >= HTTPStatus.BAD_REQUEST:
            _log.warning("%s%s for %s answered %d: %s", self._url, path, encoder, response.status, text[:300])
            return False
        self.told ^= {encoder}
        return True
