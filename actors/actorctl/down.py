"""`actorctl down`: asks the supervisor to drain; without one, ends the actors and the bus by what they recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Final

from physarum.actors import states
from physarum.actors.actorctl.target import recorded_config, recorded_endpoint
from physarum.actors.context import RunFolder
from physarum.actors.supervising import SUPERVISOR, supervisor_on
from physarum.actors.supervisor.assembly import Head
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.supervisor.errors import InterruptedRunError, NotRunningError, SupervisorError
from physarum.actors.supervisor.leftovers import end_actors
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_lock import Holder, holder
from physarum.bus import control
from physarum.bus.connection import Bus
from physarum.bus.presence import Roster
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea

_CONNECT_S: Final = 5.0
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
    found, name = holder(folder.path), folder.path.name
    if found is not None:
        actors = tuple(record.instance for record in read_records(folder.actors) if record.alive)
        await _ask(folder, found, at_once)
        return Stopped(name, found.pid, actors, bus=True)
    config = recorded_config(folder)
    actors = await end_actors(folder, 0.0 if at_once else config.supervisor.drain_timeout_s)
    server = embedded_server(config, folder)
    had_bus = server.running() is not None
    await server.stop()
    await asyncio.to_thread(SharedArea.remove_of_run, folder.path)
    if config.machines and name == folder.run:
        await _tell_machines(config, folder)
    return Stopped(name, None, actors, had_bus)


async def stop_machine(folder: RunFolder, machine: str, at_once: bool) -> None:
    """Has one machine end its part, and waits for that; the run goes on. Raises NotRunningError (it is not there),
    DownTimeoutError."""
    config, me = recorded_config(folder), supervisor_on(machine)
    limit_s = 2 * config.supervisor.drain_timeout_s + _MARGIN_S
    bus = await Bus.connect(recorded_endpoint(folder), folder.run, "down", _CONNECT_S)
    try:
        async with Roster(bus, SUPERVISOR).open() as supervisors:
            there = {beat.instance: str(beat.facts.get("machine")) for beat in supervisors.members}
            if me not in there:
                names = ", ".join(sorted(there.values())) or "none"
                raise NotRunningError(f"machine {machine} of run {folder.run} is not there; there are: {names}")
            await control.call(bus, SUPERVISOR, me, "down", {"now": at_once}, bus.timeout_s)
            try:
                async with asyncio.timeout(limit_s):
                    while any(beat.instance == me for beat in supervisors.members):
                        await supervisors.wait_change(limit_s)
            except TimeoutError:
                raise DownTimeoutError(
                    f"machine {machine} has not ended its part within {limit_s:g} s; look at its log there, or repeat with"
                    " --now"
                ) from None
    finally:
        await bus.close()


async def _tell_machines(config: RootConfig, folder: RunFolder) -> None:
    """For a head whose supervisor is gone: the others are to end as if it had told them."""
    bus = await Bus.connect(recorded_endpoint(folder), folder.run, "down", _CONNECT_S)
    try:
        publisher = await Publisher(bus).start()
        opened = (await Register(bus, publisher, "run", states.Assembly).get(states.ASSEMBLY)).value
        if opened is not None and opened.phase == "open":
            await Head(config, bus, publisher, opened.address).end(InterruptedRunError("actorctl down"))
    finally:
        await bus.close()


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
