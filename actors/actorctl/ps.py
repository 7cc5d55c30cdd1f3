"""`actorctl ps`: every actor of a run, from what was recorded at its start and from its heartbeat."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from physarum.actors.actorctl.target import recorded_config, recorded_endpoint
from physarum.actors.context import RunFolder
from physarum.actors.display.machines import machine_rows, machines_text
from physarum.actors.display.text import STATE_STYLES, duration, facts
from physarum.actors.display.view import ActorRow, actor_rows
from physarum.actors.supervisor.errors import NotRunningError
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_lock import holder
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import Heartbeat, Roster
from physarum.configs.placement import machine_of
from physarum.configs.root import RootConfig

_CONNECT_S = 5.0


async def look(folder: RunFolder) -> dict[str, Any]:
    """The state of a run as plain values. Raises NotRunningError when nothing of it is there."""
    found, config = holder(folder.path), recorded_config(folder)
    # Under a supervisor a process that has ended is about to be started again; without one it is just gone.
    records = [record for record in read_records(folder.actors) if record.alive or found is not None]
    nothing_here = found is None and not records
    heartbeats, bus_error = ([], "") if nothing_here and not config.machines else await _heartbeats(folder)
    if nothing_here and not heartbeats:
        raise NotRunningError(f"run {folder.run} is not running; start it with `actorctl up`")
    now = time.time()
    actors = [_plain(row, now) for row in actor_rows(records, heartbeats)]
    if config.machines:
        here = {record.instance for record in records}
        actors = [_placed(actor, config, actor["instance"] in here) for actor in actors]
    return {
        "run": folder.run,
        "supervisor": None if found is None else found.pid,
        "bus": bus_error or "up",
        "machines": machine_rows(config, heartbeats),
        "actors": actors,
    }


def show(state: dict[str, Any], console: Console) -> None:
    supervisor = state["supervisor"]
    by = (
        (
            "no supervisor here"
            if state["machines"]
            else "no supervisor (it was killed; `actorctl up` adopts the actors)"
        )
        if supervisor is None
        else f"supervisor {supervisor}"
    )
    console.print(f"run {state['run']}: {by}, bus {state['bus']}", markup=False, highlight=False, soft_wrap=True)
    if state["machines"]:
        text = f"machines {machines_text(state['machines'])}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="dim")
    if state["machines"]:
        table.add_column("machine", no_wrap=True)
    for name in ("role", "instance", "pid", "state", "up", "restarts", "gpus", "lag", "numbers"):
        table.add_column(name, no_wrap=True)
    for actor in state["actors"]:
        table.add_row(*([actor["machine"]] if state["machines"] else []), *_cells(actor))
    console.print(table)


def _cells(actor: dict[str, Any]) -> tuple[str | Text, ...]:
    lag_s = actor["lag_s"]
    return (
        actor["role"],
        actor["instance"],
        str(actor["pid"]),
        Text(actor["state"], style=STATE_STYLES.get(actor["state"], "")),
        duration(actor["uptime_s"]),
        "-" if actor["restarts"] is None else str(actor["restarts"]),
        ",".join(map(str, actor["gpus"])) or "-",
        "-" if lag_s is None else f"{1000 * lag_s:.0f} ms",
        facts(actor["numbers"]),
    )


def _placed(actor: dict[str, Any], config: RootConfig, here: bool) -> dict[str, Any]:
    """With its machine; how often another machine started an actor, and on which devices, is not told here."""
    machine = machine_of(config, actor["role"], actor["instance"])
    return {**actor, "machine": machine, "restarts": actor["restarts"] if here else None}


def _plain(row: ActorRow, now: float) -> dict[str, Any]:
    return {
        "role": row.role,
        "instance": row.instance,
        "pid": row.pid,
        "state": row.state,
        "uptime_s": round(now - row.started_at, 1),
        "restarts": row.restarts,
        "gpus": list(row.gpus),
        "lag_s": row.lag_s,
        "numbers": dict(row.numbers),
    }


async def _heartbeats(folder: RunFolder) -> tuple[list[Heartbeat], str]:
    """What the bus knows, or why it cannot be asked: the processes are shown all the same."""
    try:
        bus = await Bus.connect(recorded_endpoint(folder), folder.run, "ps", _CONNECT_S)
    except (BusError, NotRunningError) as error:
        return [], f"unreachable: {error}"
    try:
        async with Roster(bus).open() as roster:
            return roster.members, ""
    except BusError as error:
        return [], f"unreachable: {error}"
    finally:
        await bus.close()
