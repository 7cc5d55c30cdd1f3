"""`actorctl ledger`: the account of a live, an interrupted or a finished run, or what it knows of a step, sample, version."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import typer

from physarum.actors.account import accounts
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

    Raises NotRunningError for a run without a bus, or BusUnreachableError. `policies`: those of further ones, by name, where
    the run trains several.
    """
    config = recorded_config(folder)
    up = config.bus.url is not None or embedded_server(config, folder).running() is not None
    if not up and not recount and folder.summary.is_file():
        summary: dict[str, Any] = orjson.loads(folder.summary.read_bytes())
        return _together(
            summary["account"], {name: one["account"] for name, one in summary.get("policies", {}).items()}
        )
    async with opened(folder, "ledger") as run:
        found = await accounts(run.bus, run.config.policies)
        return _together(found.pop("").to_dict(), {name: one.to_dict() for name, one in found.items()})


def _together(own: dict[str, Any], further: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {**own, **({"policies": further} if further else {})}


def account_text(found: dict[str, Any]) -> str:
    """The equation, and a line for each further policy."""
    further = [f"{name}: {account_line(one)}" for name, one in found.get("policies", {}).items()]
    return "\n".join([account_line(found), *further])


async def step_of(folder: RunFolder, number: int, policy: str | None) -> list[StepView]:
    """Every record of a policy's step with this number. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await steps_at(run.of_policy(policy), number)


async def sample_of(folder: RunFolder, wanted: str, policy: str | None) -> SampleView:
    """A task or an execution, and what a policy made of it. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await sample_view(run.of_policy(policy), wanted)


async def version_of(folder: RunFolder, label: str) -> VersionView:
    """A version of the weights. Raises NotInRunError."""
    async with opened(folder, "ledger") as run:
        return await version_view(run.of_label(label), label)


def closes(found: dict[str, Any]) -> bool:
    """Nothing lost and nothing trained twice."""
    return int(found["imbalance"]) == 0 and int(found["double_trained"]) == 0


def refuse_open(found: dict[str, Any]) -> None:
    """Ends the command with a message and status 1 when an account does not close."""
    for further in found.get("policies", {}).values():
        refuse_open(further)
    if not closes(found):
        sys.stderr.write(
            f"error: the account does not close: {account_line(found)}; {found['double_trained']} trained twice;"
            " expected 0 and 0. Keep the run folder and report it: this is a fault of physarum\n"
        )
        raise typer.Exit(exits.FAILED)
