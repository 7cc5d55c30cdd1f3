"""`actorctl up --machine NAME`: one machine's part of a run, supervised to the run's end."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import uvloop

from physarum.actors.actorctl.options import print_json
from physarum.actors.actorctl.up import announce_ready, configure_logging, refuse_bad, refuse_taken, screen
from physarum.actors.context import RunFolder
from physarum.actors.model_maker import Reporter
from physarum.actors.supervisor.machine import MachineSupervisor
from physarum.actors.supervisor.stop import StopRequest
from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.machines import HEAD
from physarum.configs.placement import machine_names
from physarum.configs.root import RootConfig
from physarum.configs.suggest import nearest

VARIABLE: Final = "PHYSARUM_MACHINE"


def chosen(config: RootConfig, name: str | None) -> str:
    """Which machine of the run this is: `name`, or PHYSARUM_MACHINE, or the head. Raises ConfigError for one that it lacks."""
    wanted, where = (name, "--machine") if name is not None else (os.environ.get(VARIABLE) or HEAD, VARIABLE)
    known = machine_names(config)
    if wanted in known:
        return wanted
    near = nearest(wanted, known)
    remedy = f"write {near}" if near is not None else "name it under `machines:`"
    listed = ", ".join(known[:8]) + (f" ... ({len(known)} in all)" if len(known) > 8 else "")
    raise ConfigError([Problem(Severity.ERROR, where, f"machine {wanted!r}", f"one of {listed}", remedy)])


def run_part(
    config: RootConfig, machine: str, as_json: bool, verbose: bool, ready_fd: int | None = None
) -> dict[str, Any]:
    """Checks, then works until the run is finished; what it was."""
    shown = screen(as_json)
    refuse_taken(config, machine)
    refuse_bad(config, shown.console, machine)
    configure_logging(RunFolder(config.run.folder_on(machine)), shown.console, verbose)
    uvloop.run(_supervise(config, machine, shown.reporter, ready_fd))
    found = {"run": config.run.name, "machine": machine, "ended": "finished"}
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(f"machine {machine}: run {config.run.name} is finished\n")
    return found


async def _supervise(config: RootConfig, machine: str, reporter: Reporter, ready_fd: int | None) -> None:
    stop = StopRequest()
    with stop.on_signals():
        started = announce_ready(ready_fd)
        await MachineSupervisor(config, machine, stop, reporter, on_started=started).run()
