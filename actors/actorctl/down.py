"""`actorctl down`: asks the supervisor to drain; without one, ends the actors and the bus by what they recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Final

from physarum.actors.actorctl.target import recorded_config
from physarum.actors.context import RunFolder
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.supervisor.crew import SERVICES
from physarum.actors.supervisor.errors import SupervisorError
from physarum.actors.supervisor.process import ActorProcess, read_records, record_path
from physarum.actors.supervisor.run_lock import Holder, holder
from physarum.weightsync.area import SharedArea

_MARGIN_S: Final = 90.0
"""Beyond two drain timeouts: account, summary, and the stop of the bus."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """What `down` did. `supervisor`: its pid, or None when there was none."""

    run: str
    supervisor: int | None
    actors: tuple[str, ...]
    bus: bool


class DownTimeoutError(SupervisorError):
    """The supervisor is still there after the time that draining may take."""


async def stop_run(folder: RunFolder, at_once: bool) -> Stopped:
    """Drains (or, `at_once`, kills) a run and waits for its end. Raises DownTimeoutError."""
    found = holder(folder.path)
    if found is not None:
        actors = tuple(record.instance for record in read_records(folder.actors) if record.alive)
        await _ask(folder, found, at_once)
        return Stopped(folder.path.name, found.pid, actors, bus=True)
    actors = await _end_actors(folder, at_once)
    server = embedded_server(recorded_config(folder), folder)
    had_bus = server.running() is not None
    await server.stop()
    await asyncio.to_thread(SharedArea.remove_of_run, folder.path)
    return Stopped(folder.path.name, None, actors, had_bus)


async def _ask(folder: RunFolder, found: Holder, at_once: bool) -> None:
    limit_s = 2 * recorded_config(folder).supervisor.drain_timeout_s + _MARGIN_S
    try:
        pidfd = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        for _ in range(2 if at_once else 1):
            # The second request must be seen as a second one: signals that are pending together are one.
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0 if at_once else limit_s):
                    await ended.wait()
        async with asyncio.timeout(limit_s):
            await ended.wait()
    except ProcessLookupError:
        return
    except TimeoutError:
        raise DownTimeoutError(
            f"the supervisor (process {found.pid}) has not ended within {limit_s:g} s; look at {folder.logs}, or repeat"
            " with --now"
        ) from None
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _end_actors(folder: RunFolder, at_once: bool) -> tuple[str, ...]:
    """Actors that a killed supervisor left working."""
    timeout_s = recorded_config(folder).supervisor.drain_timeout_s
    adopted = [process for record in read_records(folder.actors) if (process := ActorProcess.adopt(record)) is not None]
    for services in (False, True):
        await _end([one for one in adopted if (one.record.role in SERVICES) is services], 0.0 if at_once else timeout_s)
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
    async with asyncio.timeout(_MARGIN_S):
        await ended
