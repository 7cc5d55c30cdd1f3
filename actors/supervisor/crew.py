"""All actors of one machine: started together, drained in an order in which each can finish what it holds.

first   source, evaluator, rollout, reward, trainer   (they finish episodes and steps, for which they need ...)
then    engine, node, router, checkpoint              (... these)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.keeper import Keeper
from physarum.actors.supervisor.process import ActorProcess, ActorRecord, record_path
from physarum.actors.supervisor.stop import StopRequest

_log = logging.getLogger(__name__)

SERVICES: Final = ("engine", "node", "router", "checkpoint")
_KILL_TIMEOUT_S: Final = 15.0


class Crew:
    """The keepers of a run's actors on this machine."""

    def __init__(self, folder: RunFolder, keepers: Sequence[Keeper], stop: StopRequest, drain_timeout_s: float) -> None:
        self.keepers = list(keepers)
        self._folder = folder
        self._stop = stop
        self._drain_timeout_s = drain_timeout_s
        self._by_instance = {keeper.instance: keeper for keeper in keepers}

    def records(self) -> list[ActorRecord]:
        """The processes that run now, in start order."""
        processes = [keeper.process for keeper in self.keepers if keeper.process is not None]
        return [process.record for process in processes if not process.ended]

    def kill_hung(self, instance: str) -> None:
        if (keeper := self._by_instance.get(instance)) is not None:
            keeper.kill_hung()

    def others_stand(self, role: str, instance: str, alike: Callable[[str, str], bool]) -> bool:
        """Whether another of a role stands of which `alike(instance, other)` says that it does the same work."""
        return any(
            keeper.stands
            for keeper in self.keepers
            if keeper.role == role and keeper.instance != instance and alike(instance, keeper.instance)
        )

    def join(self, keeper: Keeper) -> None:
        """Takes another one in; whoever calls begins and keeps it."""
        self.keepers.append(keeper)
        self._by_instance[keeper.instance] = keeper

    async def leave(self, keeper: Keeper) -> None:
        """Lets one actor drain, and forgets it. A member of its name may join only after."""
        keeper.finishing.set()
        await self._end([keeper])
        record_path(self._folder.actors, keeper.instance).unlink(missing_ok=True)
        self.keepers.remove(keeper)
        del self._by_instance[keeper.instance]
        _log.info("%s has left", keeper.instance)

    async def drain(self, before_services: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ends every actor: SIGTERM, then SIGKILL after the drain timeout, or at once when asked a second time.

        `before_services` is waited for between the two waves: others may still need what the services give.
        """
        for keeper in self.keepers:
            keeper.finishing.set()
        waves = [[k for k in self.keepers if (k.role in SERVICES) is services] for services in (False, True)]
        await self._end(waves[0])
        if before_services is not None:
            await before_services()
        await self._end(waves[1])
        for keeper in self.keepers:
            record_path(self._folder.actors, keeper.instance).unlink(missing_ok=True)

    async def _end(self, wave: Sequence[Keeper]) -> None:
        processes = [keeper.process for keeper in wave if keeper.process is not None and not keeper.process.ended]
        if not processes:
            return
        for process in processes:
            process.terminate()
        ended = asyncio.create_task(_all_ended(processes))
        at_once = asyncio.create_task(self._stop.at_once.wait())
        await asyncio.wait({ended, at_once}, timeout=self._drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        for process in processes:
            if not process.ended:
                _log.warning("%s has not drained; killing it", process.record.instance)
                process.kill()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await ended
        except TimeoutError:
            left = ", ".join(f"{p.record.instance} (pid {p.record.pid})" for p in processes if not p.ended)
            _log.error(
                "the kernel has not ended %s within %g s after SIGKILL; look for a hung device", left, _KILL_TIMEOUT_S
            )


async def _all_ended(processes: Sequence[ActorProcess]) -> bool:
    await asyncio.gather(*(process.wait() for process in processes))
    return True
