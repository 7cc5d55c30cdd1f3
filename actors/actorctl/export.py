"""`actorctl export`: a run's recorded samples as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, say
from physarum.actors.context import RunFolder
from physarum.actors.tools import exporting
from physarum.actors.tools.access import opened
from physarum.actors.tools.exporting import Export

First = Annotated[Optional[int], typer.Option("--from", min=1, help="First sequence in the sample log.")]  # noqa: UP045
Last = Annotated[Optional[int], typer.Option("--to", min=1, help="Last sequence, included.")]  # noqa: UP045


def export(
    name: Target,
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl|FILE.msgpack", help="The ending names the form.")],
    first: First = None,
    last: Last = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the samples of a run to a file: .msgpack without loss, .jsonl readable. Trimmed ranges are named."""
    with exits.reported(verbose):
        made = uvloop.run(_export(target.find(name, root), file, first, last))
        gone = ", ".join(f"{start} to {end}" for start, end in made.missing)
        missing = f"; missing (trimmed): {gone}" if gone else ""
        say(msgspec.structs.asdict(made), f"{made.executions} executions in {made.file}{missing}", as_json)


async def _export(folder: RunFolder, file: Path, first: int | None, last: int | None) -> Export:
    async with opened(folder, "export") as run:
        return await exporting.export(run, file, first, last)
