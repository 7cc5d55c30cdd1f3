"""`actorctl sampling`: how tokens are drawn, changed while a run goes on."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, print_json
from physarum.actors.context import RunFolder
from physarum.actors.tools.access import opened
from physarum.actors.tools.sampling import change_sampling
from physarum.actors.tools.sampling import sampling as sampling_now

Changes = Annotated[
    Optional[list[str]],  # noqa: UP045  # typer reads the annotation at run time
    typer.Argument(metavar="[NAME=VALUE]...", help="`top_p=0.95`, `max_new_tokens=2048`; none: say what holds."),
]
Reset = Annotated[bool, typer.Option("--reset", help="Go back to what is configured first.")]


def sampling(
    name: Target,
    changes: Changes = None,
    reset: Reset = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Look up or change the sampling parameters of a run's training requests. The next request of every worker has them."""
    with exits.reported(verbose):
        found = uvloop.run(_done(target.find_part(name, root), changes or [], reset))
        if as_json:
            print_json(found)
            return
        for key, value in found.items():
            typer.echo(f"{key:<24} {value}")


async def _done(folder: RunFolder, changes: list[str], reset: bool) -> dict[str, Any]:
    async with opened(folder, "actorctl") as run:
        return await change_sampling(run, changes, reset) if changes or reset else await sampling_now(run)
