"""`actorctl replay`: a second trainer over the recorded samples of a run, without engines."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.ledger import refuse_open
from physarum.actors.actorctl.options import Json, Root, Settings, Target, Verbose, say
from physarum.actors.actorctl.up import run_to_end
from physarum.actors.context import RunFolder
from physarum.actors.tools import exporting, replaying
from physarum.actors.tools.access import opened
from physarum.actors.tools.exported import read_head
from physarum.actors.tools.replaying import Made
from physarum.configs.loader import resolve
from physarum.configs.overrides import Override, parse_command_line


def replay(
    name: Target,
    settings: Settings = None,
    first: Annotated[int, typer.Option("--from", min=1, help="First sequence in the sample log.")] = 1,
    last: Annotated[Optional[int], typer.Option("--to", min=1, help="Last sequence, included.")] = None,  # noqa: UP045
    trainer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--trainer", exists=True, dir_okay=False, help="A configuration over the recorded one."),
    ] = None,
    new: Annotated[Optional[str], typer.Option("--run", help="Name of the new run; NAME-replay.")] = None,  # noqa: UP045
    start: Annotated[bool, typer.Option("--start/--no-start", help="Train at once, or only make the run.")] = True,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train on the recorded samples of a run with another loss, K or batch, as a new run. Ranges that are trimmed are named.

    Settings and --trainer go over the configuration that was recorded.
    """
    with exits.reported(verbose):
        folder = target.find(name, root)
        chosen = new or f"{folder.path.name[:25].rstrip('-')}-replay"
        made = uvloop.run(_make(folder, chosen, first, last, trainer, parse_command_line(settings or [])))
        if not start:
            text = f"run {made.run} holds {made.fed.executions} executions; start it: actorctl up {made.folder}/config.yaml"
            say(msgspec.to_builtins(made), text, as_json)
            return
        refuse_open(run_to_end(resolve(Path(made.folder) / "config.yaml"), as_json, verbose)["account"])


async def _make(
    folder: RunFolder, name: str, first: int, last: int | None, trainer: Path | None, overrides: Sequence[Override]
) -> Made:
    """Exports the range to a file beside the runs, and makes the new run of it."""
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=folder.path.parent) as aside:
        file = Path(aside) / "samples.msgpack"
        async with opened(folder, "replay") as run:
            await exporting.export(run, file, first, last)
            config = replaying.replay_config(read_head(file), name, folder.path.parent, trainer, overrides)
            return await replaying.make_from_file(file, config, run)
