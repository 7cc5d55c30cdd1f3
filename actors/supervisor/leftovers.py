"""Actors that a supervisor which is gone left working on this machine: ended by what it recorded, as it would have."""

from __future__ import annotations

import asyncio
from typing import Final

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.crew import SERVICES
from physarum.actors.supervisor.process import ActorProcess, read_records, record_path

_KILLED_S: Final = 90.0


async def end_actors(folder: RunFolder, drain_timeout_s: float) -> tuple[str, ...]:
    """Drains them (0: kills them) in the order of a crew, and clears their records. The instances that were there."""
    adopted = [process for record in read_records(folder.actors) if (process := ActorProcess.adopt(record)) is not None]
    for services in (False, True):
        await _end([one for one in adopted if (one.record.role in SERVICES) is services], drain_timeout_s)
    for record in read_records(folder.actors):
        record_path(folder.actors, record.instance).unlink(missing_ok=True)
    return tuple(process.record.instance for process in adopted)


async def _end(processes: list[ActorProcess], timeout_s: float) -> None:
    if not processes:
        return
    for process in processes:
        process.terminate()
    ended = asyncio.gather(*(process.wait() for process in processes))
    await asyncio.wait({ended}, timeout=timeout_s)
    for process in processes:
        process.kill()
    async with asyncio.timeout(_KILLED_S):
        await ended
