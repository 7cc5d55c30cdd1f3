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
from physarum.actors.supervisor.errors import SupervisorError
from physarum.actors.supervisor.leftovers import end_actors
from physarum.actors.supervisor.process import read_records
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
    config = recorded_config(folder)
    actors = await end_actors(folder, 0.0 if at_once else config.supervisor.drain_timeout_s)
    server = embedded_server(config, folder)
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
