"""`actorctl dead ls|show|retry|drop`: what could not be processed, and what is to become of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, group, print_json, say
from physarum.actors.context import RunFolder
from physarum.actors.tools import letters
from physarum.actors.tools.access import OpenRun, opened
from physarum.actors.tools.letters import Letter
from physarum.configs.errors import ConfigError, Problem, Severity

app = group("Dead letters: tasks and executions that were given up, with their reasons.")

_BODY_CHARS: Final = 2000

Ids = Annotated[Optional[list[int]], typer.Argument(metavar="[ID]...", help="As `dead ls` shows them.")]  # noqa: UP045
All = Annotated[bool, typer.Option("--all", help="Every letter that nothing was decided about.")]


@app.command("ls", epilog=exits.HELP)
def ls(
    name: Target,
    every: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the dead letters that nothing was decided about."""
    with exits.reported(verbose):
        found = uvloop.run(_listed(target.find(name, root), every))
        if as_json:
            print_json({"letters": found})
            return
        for row in found:
            task = row.task or "unreadable"
            typer.echo(f"{row.id:>6}  {row.state:<8} {row.stream:<9} {task}  x{row.deliveries}  {row.reason}")
        if not found:
            typer.echo(f"run {name} has no dead letters" + ("" if every else " to decide about"))


@app.command("show", epilog=exits.HELP)
def show(
    name: Target,
    number: Annotated[int, typer.Argument(metavar="ID")],
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show one dead letter: its reason, its history, its task and its headers."""
    with exits.reported(verbose):
        found = uvloop.run(_shown(target.find(name, root), number))
        if as_json:
            print_json(found)
        else:
            typer.echo("\n".join(f"{key}: {str(value)[:_BODY_CHARS]}" for key, value in found.items()))


@app.command("retry", epilog=exits.HELP)
def retry(
    name: Target,
    ids: Ids = None,
    every: All = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Send dead tasks and executions on their way again, after what killed them is mended."""
    with exits.reported(verbose):
        done = uvloop.run(_decide(target.find(name, root), "retry", ids or [], every))
        say({"retried": done}, f"{len(done)} sent on their way again: {_numbers(done)}", as_json)


@app.command("drop", epilog=exits.HELP)
def drop(
    name: Target,
    ids: Ids = None,
    every: All = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Give dead letters up: they stay in the account as dead and are listed no longer."""
    with exits.reported(verbose):
        done = uvloop.run(_decide(target.find(name, root), "drop", ids or [], every))
        say({"dropped": done}, f"{len(done)} given up: {_numbers(done)}", as_json)


async def _listed(folder: RunFolder, every: bool) -> list[letters.Row]:
    async with opened(folder, "dead") as run:
        return [letters.row(one) for one in await letters.letters(run.bus) if every or one.mark is None]


async def _shown(folder: RunFolder, number: int) -> dict[str, Any]:
    async with opened(folder, "dead") as run:
        found = await letters.find(run.bus, number)
    task = found.task
    plain: dict[str, Any] = msgspec.to_builtins(letters.row(found))
    return {
        **plain,
        "subject": found.letter.subject,
        "headers": found.letter.headers,
        "body_bytes": len(found.letter.body),
        "record": None if task is None else msgspec.structs.asdict(task),
    }


async def _decide(folder: RunFolder, verb: str, ids: Sequence[int], every: bool) -> list[int]:
    if bool(ids) == every:
        found = "IDs and --all" if every else "neither ID nor --all"
        remedy = "name letters as `dead ls` shows them, or write --all"
        raise ConfigError([Problem(Severity.ERROR, f"dead {verb}", found, "one of the two", remedy)])
    async with opened(folder, "dead") as run:
        chosen = await _chosen(run, ids)
        for letter in chosen:
            await (letters.retry(run, letter) if verb == "retry" else letters.drop(run, letter))
    return [letter.id for letter in chosen]


async def _chosen(run: OpenRun, ids: Sequence[int]) -> list[Letter]:
    if ids:
        return [await letters.find(run.bus, number) for number in ids]
    return [one for one in await letters.letters(run.bus) if one.mark is None]


def _numbers(done: Sequence[int]) -> str:
    return ", ".join(map(str, done)) or "none"
