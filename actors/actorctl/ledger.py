"""`actorctl ledger`: the account of a live, an interrupted or a finished run, or what it knows of a step, sample, version."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import typer

from physarum.actors.account import account
from physarum.actors.actorctl import exits
from physarum.actors.actorctl.target import recorded_config
from physarum.actors.context import RunFolder
from physarum.actors.display.result import account_line
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.tools.access import opened
from physarum.actors.tools.samples import SampleView, sample_view
from physarum.actors.tools.steps import StepView, steps_at
from physarum.actors.tools.versions import VersionView, version_view


async def account_of(folder: RunFolder, recount: bool) -> dict[str, Any]:
    """Counted on the bus when that is up; else from the summary, or (`recount`, or none) with the server started for it.

    Raises NotRunningError for a run without a bus, or BusUnreachableError.
    """
    config = recorded_config(folder)
    up = config.bus.url is not None or embedded_server(config, folder).running() is not None
    if not up and not recount and folder.summary.is_file():
        found: dict[str, Any] = orjson.loads(folder.summary.read_bytes())["account"]
        return found
    async with opened(folder, "ledger") as run:
        return (await account(run.bus)).to_dict()


async def step_of(folder: RunFolder, number: int) -> list[StepView]:
    """Every record of the step with this number. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await steps_at(run, number)


async def sample_of(folder: RunFolder, wanted: str) -> SampleView:
    """A task or an execution. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await sample_view(run, wanted)


async def version_of(folder: RunFolder, label: str) -> VersionView:
    """A version of the weights. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await version_view(run, label)


def closes(found: dict[str, Any]) -> bool:
    """Nothing lost and nothing trained twice."""
    return int(found["imbalance"]) == 0 and int(found["double_trained"]) == 0


def refuse_open(found: dict[str, Any]) -> None:
    """Ends the command with a message and status 1 when the account does not close."""
    if not closes(found):
        sys.stderr.write(
            f"error: the account does not close: {account_line(found)}; {found['double_trained']} trained twice;"
            " expected 0 and 0. Keep the run folder and report it: this is a fault of physarum\n"
        )
        raise typer.Exit(exits.FAILED)
