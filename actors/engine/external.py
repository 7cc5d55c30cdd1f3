"""Somebody else's SGLang server: attached by its URL, updated, detached; never started and never stopped."""

from __future__ import annotations

import asyncio

import aiohttp

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineDiedError, EngineStartTimeoutError
from physarum.actors.engine.readiness import until_healthy


class ExternalEngine:
    """The surface of EngineProcess, for a server whose process is not ours."""

    pid: int | None = None
    key: str | None = None
    bootstrap_port: int | None = None

    def __init__(self, url: str) -> None:
        self.url = self.announced = url.rstrip("/")

    async def wait_healthy(self, session: aiohttp.ClientSession, timeout_s: float, empty: bool = False) -> None:
        """Returns when the server has generated a token; `empty`: when it answers. Raises EngineStartTimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                await until_healthy(EngineControl(self.url, session), empty)
        except TimeoutError as error:
            raise EngineStartTimeoutError(
                f"no engine answered at {self.url} within {timeout_s:g} s; start it, correct engines.<group>.url, or raise"
                " engines.<group>.start_timeout_s"
            ) from error

    async def wait_exit(self) -> int:
        """Never: nobody tells of its end. Its actor sees that it does not answer."""
        await asyncio.Event().wait()
        return 0

    def death(self) -> EngineDiedError:
        return EngineDiedError(f"engine {self.url} is gone")

    async def stop(self) -> int:
        """It goes on serving."""
        return 0
