"""`actorctl scale`, `drain`, `cordon` and `uncordon`: how many actors work, and which."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Optional

import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, print_json
from physarum.actors.context import RunFolder
from physarum.actors.tools import crew
from physarum.actors.tools.access import OpenRun, opened

Changes = Annotated[
    Optional[list[str]],  # noqa: UP045  # typer reads the annotation at run time
    typer.Argument(metavar="[GROUP=N]...", help="`rollout=8`, `engine=+2`, `policy=-1`; none: say how many there are."),
]
Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="As `actorctl ps` shows it, for example policy-1.")]


def scale(
    name: Target, changes: Changes = None, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Set how many rollout, reward and engine actors a run has. The supervisor starts or drains them; a run that is not live
    has as many when it is started."""
    work = (lambda run: crew.scale(run, changes)) if changes else crew.sizes
    _shown(name, root, as_json, verbose, work)


def drain(
    name: Target, instance: Instance, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Let one actor finish or hand back what it holds, and leave for good."""
    _shown(name, root, as_json, verbose, lambda run: crew.drain(run, instance))


def cordon(
    name: Target, instance: Instance, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Give one actor nothing new; what it has it keeps."""
    _shown(name, root, as_json, verbose, lambda run: crew.pause(run, instance, True))


def uncordon(
    name: Target, instance: Instance, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False
) -> None:
    """Let a cordoned actor go on."""
    _shown(name, root, as_json, verbose, lambda run: crew.pause(run, instance, False))


def _shown(
    name: str, root: Any, as_json: bool, verbose: bool, work: Callable[[OpenRun], Awaitable[dict[str, Any]]]
) -> None:
    with exits.reported(verbose):
        found = uvloop.run(_done(target.find_part(name, root), work))
        if as_json:
            print_json(found)
            return
        for key, value in found.items():
            many = f"{len(value)}  ({', '.join(map(str, value))})" if isinstance(value, list) else value
            typer.echo(f"{key:<16} {many}")


async def _done(folder: RunFolder, work: Callable[[OpenRun], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    async with opened(folder, "actorctl") as run:
        return await work(run)
