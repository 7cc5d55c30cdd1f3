"""`actorctl tasks add|ls`: rows for a run that goes on."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, group, print_json
from physarum.actors.added_rows import Priority
from physarum.actors.context import RunFolder
from physarum.actors.tools import adding
from physarum.actors.tools.access import opened
from physarum.actors.tools.adding import Added, Row
from physarum.actors.tools.errors import BadLinesError

app = group("Rows that are added to a run while it goes on.")


@app.command("add", epilog=exits.HELP)
def add(
    name: Target,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines.", exists=True, dir_okay=False)],
    later: Annotated[bool, typer.Option("--later", help="Among the other rows' tasks, not before them.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also lines of this file that were added before.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Give the rows of FILE to a run, read with its `source.columns`; each line of a file is added once.

    When the command returns, what it accepted is stored on the bus: the source issues it as soon as it may.
    """
    with exits.reported(verbose):
        done = uvloop.run(
            _add(target.find(name, root), file, "p1" if later else "p0", uuid.uuid4().hex if again else "")
        )
        if as_json:
            print_json(done)
        else:
            typer.echo(f"{done.accepted} rows accepted, {done.present} were there, {done.broken} broken")
        if done.broken:
            raise BadLinesError("; ".join(done.named))


@app.command("ls", epilog=exits.HELP)
def ls(name: Target, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False) -> None:
    """List the rows that were added, and whether they are issued."""
    with exits.reported(verbose):
        found = uvloop.run(_listed(target.find(name, root)))
        if as_json:
            print_json({"rows": found})
            return
        for row in found:
            typer.echo(f"{row.group:<24} {row.state:<8} {row.priority}  {Path(row.file).name}:{row.line}  {row.prompt}")
        if not found:
            typer.echo(f"no rows were added to run {name}")


async def _add(folder: RunFolder, file: Path, priority: Priority, again: str) -> Added:
    async with opened(folder, "tasks") as run:
        return await adding.add(run, file, priority, again)


async def _listed(folder: RunFolder) -> list[Row]:
    async with opened(folder, "tasks") as run:
        return await adding.added(run)
